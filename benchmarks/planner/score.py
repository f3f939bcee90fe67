"""Errors of the planner on published measurements: as shipped, and cross-validated."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.planner.calibration import CALIBRATION
from phalanx.planner.flops import token_flops
from phalanx.planner.software import SPEEDS
from phalanx.planner.stack_memory import largest_memory

from .fields import Row
from .fit import Array, Fitted, Linear, cross_validated, folds_by_family, folds_by_source, log_errors
from .truth import Measured, memory_rows, scored

GIB = 2**30


@dataclass(frozen=True)
class Line:
    """Mean absolute relative errors of one group of rows. by_source, by_family: predicted by numbers that were fitted
    without the row's source, or without its family of configurations; constant: a share of the peak, the median of the
    other sources' rows on the same kind of GPU."""

    name: str
    rows: int
    shipped: float
    by_source: float
    by_family: float
    constant: float


@dataclass(frozen=True)
class Memory:
    """Errors of peak memory, and how many of the runs that ran out of it are called, and of those that did not."""

    rows: int
    error: float
    out_of_memory: int
    called: int
    fitting: int
    false_alarms: int


@dataclass(frozen=True)
class Ranking:
    """What choosing by the planner costs over the best of a set of rivals, mean and largest."""

    sets: int
    regret: float
    worst: float


@dataclass(frozen=True)
class Score:
    """The whole scoreboard."""

    rows: Sequence[Measured]
    shipped: Array
    by_source: Array
    by_family: Array
    constant: Array
    memory: Memory
    num_rows: int

    def lines(self, name_of: Mapping[str, str] | None = None) -> dict[str, list[Line]]:
        """The lines by tier, by kind of GPU and by source."""
        keys = {
            "tier": [f"tier {row.row.get('tier')}" for row in self.rows],
            "GPU": [row.kind for row in self.rows],
            "source": [row.source for row in self.rows],
        }
        return {title: self._grouped(names) for title, names in keys.items()}

    def _grouped(self, names: Sequence[str]) -> list[Line]:
        return [self._line(name, np.array([each == name for each in names])) for name in sorted(set(names))]

    def _line(self, name: str, mask: Array) -> Line:
        columns = (self.shipped, self.by_source, self.by_family, self.constant)
        return Line(name, int(mask.sum()), *(_mean_error(column[mask]) for column in columns))


def _mean_error(logs: Array) -> float:
    return float(np.mean(np.abs(np.expm1(logs))))


def score(rows: Sequence[Row]) -> Score:
    """Scores all rows whose step time or memory counts."""
    measured = scored(rows)
    linear = Linear(measured)
    sources = folds_by_source(measured)
    return Score(
        rows=measured,
        shipped=log_errors(Fitted(CALIBRATION, SPEEDS), measured),
        by_source=cross_validated(linear, sources),
        by_family=cross_validated(linear, folds_by_family(measured)),
        constant=_constant_share(measured, sources),
        memory=score_memory(rows),
        num_rows=len(rows),
    )


def _constant_share(rows: Sequence[Measured], folds: Iterable[Array]) -> Array:
    """Log errors of the plainest estimate: model operations over the peak times the median share that others reach."""
    logs = np.array([np.log(_ideal_s(row) / row.step_s) for row in rows])
    errors: Array = np.zeros(len(rows))
    for fold in folds:
        for index in np.flatnonzero(fold):
            others = [logs[i] for i, row in enumerate(rows) if not fold[i] and row.kind == rows[index].kind]
            share = statistics.median(others or list(logs[~fold]))
            errors[index] = logs[index] - share
    return errors


def _ideal_s(row: Measured) -> float:
    config = row.config
    tokens = config.run.global_batch_size * config.run.seq_len
    flops = token_flops(config.model, config.run.seq_len, causal=False).model * tokens
    gpu = config.cluster.gpu
    peak = gpu.fp8_tflops if "fp8" in config.run.precision else gpu.bf16_tflops
    peak = gpu.fp4_tflops if "fp4" in config.run.precision else peak
    return flops / (peak * 1e12 * config.layout.world_size)


def score_memory(rows: Sequence[Row]) -> Memory:
    """Peak memory against what was measured, GiB."""
    errors, called, out, fitting, alarms = [], 0, 0, 0, 0
    for _, read, measured in memory_rows(rows):
        config = read.config
        held = largest_memory(config.model, config.layout, config.run, config.software).total_bytes
        capacity = read.memory_gib * GIB if read.memory_gib else config.cluster.gpu.memory_bytes
        if measured.get("oom"):
            out, called = out + 1, called + (held > capacity)
            continue
        fitting, alarms = fitting + 1, alarms + (held > capacity)
        errors.append(abs(held / GIB / float(measured["mem_gb"]) - 1))
    return Memory(len(errors), statistics.fmean(errors) if errors else 0.0, out, called, fitting, alarms)


def score_ranking(sets: Sequence[Mapping[str, object]], rows: Sequence[Row], fitted: Fitted | None = None) -> Ranking:
    """Regret over sets of rival layouts: `rows` of each hold `id` and the measured `s_per_sample`."""
    used = fitted or Fitted(CALIBRATION, SPEEDS)
    known = {str(row.row["id"]): row for row in scored(rows)}
    regrets = []
    for each in sets:
        rivals = each["rows"]
        assert isinstance(rivals, list)
        seen = {str(rival["id"]): float(rival["s_per_sample"]) for rival in rivals if str(rival["id"]) in known}
        if len(seen) < 2:
            continue
        configs = {name: known[name].config for name in seen}
        chosen = min(seen, key=lambda name: used.seconds(configs[name]) / configs[name].run.global_batch_size)
        regrets.append(seen[chosen] / min(seen.values()) - 1)
    return Ranking(len(regrets), statistics.fmean(regrets), max(regrets)) if regrets else Ranking(0, 0.0, 0.0)
