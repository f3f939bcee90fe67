"""What clients see: plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from phalanx.core.expert_load import ExpertLoad
from phalanx.core.step_parts import StepParts
from phalanx.lineage import CheckpointRef
from phalanx.lineage.events import Assignment, Cause, EventType, JobState
from phalanx.lineage.registry import Origin
from phalanx.train.launch.base import Node
from phalanx.train.states import Intent

__all__ = [
    "Assignment",
    "Cause",
    "CheckpointRef",
    "EvaluationView",
    "EventType",
    "EventView",
    "IncidentAction",
    "Intent",
    "JobState",
    "JobView",
    "NodeView",
    "Origin",
    "Submitted",
]


@dataclass(frozen=True, slots=True)
class EvaluationView:
    """What the held-out split gave after a step: the loss, and what each of the job's own functions (`metrics.fn`)
    gave, by its name. None where it was not finite.
    """

    step: int
    loss: float | None
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as it stands. spec: the job file as it holds now. step, loss, epochs (passes over each source of a
    mixture, by name), replica_bytes_per_token (what all ranks handed to collectives over dp_replicate in the newest
    attempt; None where replicas sum their gradients at every step), step_parts (of the wall time of that step on rank
    0), expert_load (None for a model without experts), evaluation: the last that are known. message: what it waits for
    or does, in one line. created: ISO 8601, by the clock of the service.
    """

    name: str
    state: JobState
    intent: Intent
    revision: int
    spec: Mapping[str, Any] = field(repr=False)
    owner: str = ""
    created: str = ""
    attempt: int = 0
    step: int = 0
    num_steps: int = 0
    checkpoint: CheckpointRef | None = None
    cause: Cause | None = None
    message: str = ""
    placement: tuple[Assignment, ...] = ()
    origin: Origin | None = None
    loss: float | None = None
    num_attempts_without_progress: int = 0
    epochs: Mapping[str, float] = field(default_factory=dict)
    replica_bytes_per_token: float | None = None
    step_parts: StepParts | None = None
    expert_load: ExpertLoad | None = None
    evaluation: EvaluationView | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens to it by itself."""
        return self.state in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


@dataclass(frozen=True, slots=True)
class EventView:
    """What happened to a job. revision: number of the event. time: ISO 8601, by the clock of the service."""

    revision: int
    type: EventType
    state: JobState
    time: str
    attempt: int = 0
    step: int = 0
    actor: str = ""
    request_id: str = ""
    cause: Cause | None = None
    message: str = ""
    placement: tuple[Assignment, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, and its slots that no job holds."""

    node: Node
    num_free_slots: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that was taken, with what should be known although it is no error."""

    job: JobView
    warnings: tuple[str, ...] = ()


class IncidentAction(StrEnum):
    """What the job's policy asks for, or what is done."""

    NOTIFY = "notify"
    SKIP = "skip"
    ROLL_BACK = "roll_back"
    RESTART = "restart"
