"""Fits the numbers of `phalanx.planner.calibration` and the speeds of stacks on rows of published step times.

Errors are in logarithms, so that twice as slow counts as much as twice as fast. The model is made linear in the
logarithm of each number around its prior, and solved by weighted least squares with the prior's width as a penalty, so
that a number which the rows say nothing of stays where physics or a data sheet put it. Rows of one source are much
alike: a source of n rows weighs as sqrt(n). Large errors count in proportion, not squared (Huber).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.planner.calibration import Calibration
from phalanx.planner.time import Configuration, step_time

from .truth import Measured

# What each number was before any row was seen, and by how much of itself it may well be wrong.
PRIORS: Mapping[str, tuple[float, float]] = {
    "memory_share": (0.85, 0.10),
    "nvlink_share": (0.75, 0.10),
    "network_share": (0.80, 0.15),
    "flash_forward": (0.72, 0.15),
    "flash_backward": (0.60, 0.15),
    "flash_older": (0.65, 0.30),
    "fp8_share": (0.90, 0.10),
    "fp4_share": (0.70, 0.20),
    "eager": (1.6, 0.20),
    "exposed_data": (0.15, 0.50),
    "exposed_tensor": (0.40, 0.50),
    "exposed_pipeline": (0.40, 0.50),
    "layer_s": (2e-4, 0.30),
    "routed_s": (4e-3, 0.50),
    "step_s": (0.02, 0.30),
    "doubling": (0.003, 0.50),
}
SPEED_WIDTH, YEAR_WIDTH = 0.10, 0.04
ROW_WIDTH, LARGE = 0.06, 0.12
_STEP = 0.05

Key = tuple[str, str, int]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Fitted:
    """The fitted numbers. speeds: of (GPU kind, stack, year)."""

    calibration: Calibration
    speeds: Mapping[Key, float]

    def seconds(self, config: Configuration) -> float:
        """Predicted seconds of a step."""
        return step_time(config, self.calibration, self.speeds).total_s


class Linear:
    """The model's logarithm of seconds around the priors, and its slopes: measured values have no part in it."""

    def __init__(self, rows: Sequence[Measured], priors: Mapping[str, tuple[float, float]] = PRIORS) -> None:
        self.rows = list(rows)
        self.priors = {name: priors[name] for name in (each.name for each in fields(Calibration)) if name in priors}
        self.keys: list[Key] = sorted({_key(row) for row in rows})
        self.stacks = sorted({key[:2] for key in self.keys})
        self.base = Calibration(**{name: value for name, (value, _) in self.priors.items()})
        self.log_s = self._logs(self.base, {})
        columns = [self._slope(name) for name in self.priors]
        faster = self._logs(self.base, {key: math.exp(_STEP) for key in self.keys}) - self.log_s
        columns += [np.where([_key(row)[:2] == stack for row in rows], faster, 0.0) for stack in self.stacks]
        columns += [np.where([_key(row) == key for row in rows], faster, 0.0) for key in self.keys]
        self.slopes: Array = np.stack(columns, axis=1) / _STEP
        widths = [width for _, width in self.priors.values()]
        self.widths: Array = np.array(widths + [SPEED_WIDTH] * len(self.stacks) + [YEAR_WIDTH] * len(self.keys))

    def _logs(self, calibration: Calibration, speeds: Mapping[Key, float]) -> Array:
        fitted = Fitted(calibration, speeds)
        return np.array([math.log(fitted.seconds(row.config)) for row in self.rows])

    def _slope(self, name: str) -> Array:
        moved = replace(self.base, **{name: getattr(self.base, name) * math.exp(_STEP)})
        return self._logs(moved, {}) - self.log_s

    def fit(self, chosen: Array | None = None) -> Fitted:
        """The numbers fitted on the chosen rows (a mask; None: all)."""
        mask = np.ones(len(self.rows), dtype=bool) if chosen is None else chosen
        residual = self.log_s - np.log([row.step_s for row in self.rows])
        counts = Counter(row.source for row, used in zip(self.rows, mask, strict=True) if used)
        weights = np.array([counts[row.source] ** -0.5 if row.source in counts else 0.0 for row in self.rows]) * mask
        shift: Array = np.zeros(self.slopes.shape[1])
        for _ in range(20):
            error = np.abs(residual + self.slopes @ shift)
            robust = weights * np.minimum(1.0, LARGE / np.maximum(error, 1e-9)) / ROW_WIDTH**2
            normal = self.slopes.T @ (self.slopes * robust[:, None]) + np.diag(self.widths**-2)
            shift = np.linalg.solve(normal, -self.slopes.T @ (robust * residual))
        return self._fitted(shift, {_key(row) for row, used in zip(self.rows, mask, strict=True) if used})

    def _fitted(self, shift: Array, seen: set[Key]) -> Fitted:
        values = {
            name: _bounded(name, value * math.exp(move))
            for (name, (value, _)), move in zip(self.priors.items(), shift, strict=False)
        }
        rest = shift[len(self.priors) :]
        by_stack = dict(zip(self.stacks, rest, strict=False))
        by_key = dict(zip(self.keys, rest[len(self.stacks) :], strict=True))
        speeds = {key: math.exp(by_stack[key[:2]] + by_key[key]) for key in sorted(seen)}
        return Fitted(Calibration(**values), speeds)


def _bounded(name: str, value: float) -> float:
    shares = name.endswith("share") or name.startswith(("exposed", "flash"))
    return min(value, 1.0) if shares else value


def _key(row: Measured) -> Key:
    return (row.kind, row.config.software.stack, row.config.software.year)


def log_errors(fitted: Fitted, rows: Sequence[Measured]) -> Array:
    """Logarithm of predicted over measured seconds of each row."""
    return np.array([math.log(fitted.seconds(row.config) / row.step_s) for row in rows])


def folds_by_source(rows: Sequence[Measured], num_folds: int = 5) -> list[Array]:
    """Masks of the rows of each fold: whole sources, dealt by size so that the folds are about alike."""
    return _folds([row.source for row in rows], num_folds)


def folds_by_family(rows: Sequence[Measured], num_folds: int = 5) -> list[Array]:
    """Masks of whole families of configurations, within sources that the other folds have seen."""
    return _folds([str(row.row.get("group", row.row["id"])) for row in rows], num_folds)


def _folds(names: Sequence[str], num_folds: int) -> list[Array]:
    sizes = Counter(names)
    loads = [0] * num_folds
    fold_of: dict[str, int] = {}
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        fold_of[name] = loads.index(min(loads))
        loads[fold_of[name]] += sizes[name]
    return [np.array([fold_of[name] == fold for name in names]) for fold in range(num_folds)]


def cross_validated(linear: Linear, folds: Sequence[Array]) -> Array:
    """Log errors of each row, predicted by numbers fitted without its fold."""
    errors: Array = np.zeros(len(linear.rows))
    for fold in folds:
        fitted = linear.fit(~fold)
        held = [row for row, out in zip(linear.rows, fold, strict=True) if out]
        errors[fold] = log_errors(fitted, held)
    return errors
