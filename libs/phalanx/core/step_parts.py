"""The parts into which the wall time of a training step falls; together they are all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from enum import StrEnum


class Part(StrEnum):
    """What the training thread is doing; the value is the name of the part's seconds in `StepParts`."""

    DATA = "data_wait_s"
    FORWARD = "forward_s"
    BACKWARD = "backward_s"
    COMMUNICATION = "communication_s"
    OPTIMIZER = "optimizer_s"
    CHECKPOINT = "checkpoint_s"
    EVALUATION = "evaluation_s"
    REST = "rest_s"


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of one step on one rank, from the end of the step before it to its own end.

    data_wait_s: waiting for its batch. forward_s, backward_s: the model and the loss, recomputation as backward.
    communication_s: blocked in collectives, sends and receives, so only what no computation hid. optimizer_s: the
    gradient's norm, clipping and the update. checkpoint_s: training held up by saves and copies. evaluation_s: the
    held-out split after the step before. rest_s: all else. NaN where a step was measured before there were parts.
    """

    data_wait_s: float
    forward_s: float
    backward_s: float
    communication_s: float
    optimizer_s: float
    checkpoint_s: float
    evaluation_s: float
    rest_s: float

    @staticmethod
    def of(seconds: Mapping[Part, float]) -> StepParts:
        """The parts as a clock gives them."""
        return StepParts(**{part.value: seconds.get(part, 0.0) for part in Part})

    @property
    def wall_s(self) -> float:
        """The sum."""
        return float(sum(astuple(self)))
