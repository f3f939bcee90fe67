"""How busy the experts of a mixture were at a step: its figures, and a picture of all of them small enough to send."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_CELLS = 1 << 15
_EVEN, _STEPS_AN_OCTAVE = 128, 16


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How even a step was: tokens of the busiest expert over the mean of its layer (1: even), of the worst layer and in
    the mean of the layers; and the share of experts without any token.

    balance_loss: what the loss of balance added to what was minimised, summed over layers; None where none is weighed,
    and where it is not finite.
    """

    worst: float
    mean: float
    idle: float
    balance_loss: float | None = None

    @staticmethod
    def of(counts: npt.NDArray[np.int64], balance_loss: float | None = None) -> ExpertLoad:
        """counts [layers, E]: tokens by layer and expert. Layers without a token count nothing; a step without one is
        even, its experts idle.
        """
        counts = counts[counts.any(1)]
        if not len(counts):
            return ExpertLoad(1.0, 1.0, 1.0, balance_loss)
        busiest = counts.max(1) / counts.mean(1)
        return ExpertLoad(float(busiest.max()), float(busiest.mean()), float((counts == 0).mean()), balance_loss)


@dataclass(frozen=True, slots=True)
class ExpertHeat:
    """The load of every expert by layer, a byte a cell: 0 where it had no token, else 128 + 16 log2(m), rounded, for m
    times the mean of its layer, so that neighbouring values differ by 4.4 %; 1 and 255 also stand for all beyond them.

    load: `num_layers` rows, one behind the other, of cells of `experts_per_cell` experts each (the last cell of a row
    may have fewer), the busiest of which counts; more than one only where there were more than `MAX_CELLS` cells else.
    """

    num_layers: int
    num_experts: int
    experts_per_cell: int
    load: bytes

    @staticmethod
    def of(counts: npt.NDArray[np.int64], max_cells: int = MAX_CELLS) -> ExpertHeat:
        """counts [layers, E]: tokens by layer and expert; at most `max_cells` layers."""
        num_layers, num_experts = counts.shape
        width = math.ceil(num_experts / max(1, max_cells // num_layers))
        busiest = np.maximum.reduceat(counts, np.arange(0, num_experts, width), axis=1)
        means = counts.mean(1, keepdims=True)
        with np.errstate(divide="ignore"):
            levels = np.rint(_EVEN + _STEPS_AN_OCTAVE * np.log2(busiest / np.where(means > 0, means, 1.0)))
        cells = np.where(busiest > 0, levels.clip(1, 255), 0).astype(np.uint8)
        return ExpertHeat(num_layers, num_experts, width, cells.tobytes())

    def multiples(self) -> npt.NDArray[np.float64]:
        """The cells as multiples of the mean of their layer [layers, cells], to 2.2 %."""
        cells = np.frombuffer(self.load, np.uint8).reshape(self.num_layers, -1).astype(np.float64)
        return np.where(cells > 0, 2.0 ** ((cells - _EVEN) / _STEPS_AN_OCTAVE), 0.0)
