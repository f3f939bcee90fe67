"""Bytes of weights, gradients and optimizer state for each ZeRO stage, as the ZeRO paper counts them.

Rajbhandari et al. 2020, arXiv 1910.02054, section 5 and figure 1: with P parameters, N data-parallel ranks, 2 bytes a
weight, 2 bytes a gradient and K = 12 bytes a parameter of Adam in mixed precision (fp32 master, two moments):
(2 + 2 + K) P; stage 1: (2 + 2) P + K P / N; stage 2: 2 P + (2 + K) P / N; stage 3: (2 + 2 + K) P / N.
"""

from __future__ import annotations

from dataclasses import dataclass

ADAM_BYTES = 12


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What one rank holds through a step, in bytes."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    parameters: float,
    data_ranks: int,
    zero: int,
    *,
    weight_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = ADAM_BYTES,
) -> StateBytes:
    """The states of `parameters` parameters (those of one rank after tp, pp and ep) over `data_ranks` ranks.

    zero: 0 to 3. The byte counts are of one parameter.
    """
    return StateBytes(
        weights=weight_bytes * parameters / (data_ranks if zero >= 3 else 1),
        gradients=gradient_bytes * parameters / (data_ranks if zero >= 2 else 1),
        optimizer=optimizer_bytes * parameters / (data_ranks if zero >= 1 else 1),
    )
