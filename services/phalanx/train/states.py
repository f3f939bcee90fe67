"""A job as the fold of its events: pure. Which event may follow in which state stands in one table.

Measurements (steps, losses) are no events; they live beside the snapshot and are lost with the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from phalanx.lineage import CheckpointRef, DamagedObject
from phalanx.lineage.events import Assignment, Cause, EventType, JobEvent, JobState, key_of
from phalanx.lineage.registry import JobName, RegisteredJob
from phalanx.train.recovery import budget_after

_S, _E = JobState, EventType
WAITING: Final = frozenset({_S.QUEUED, _S.PREPARING, _S.RECOVERING})
ON_NODES: Final = frozenset({_S.STARTING, _S.RUNNING})
ACTIVE: Final = WAITING | ON_NODES
OVER: Final = frozenset({_S.SUCCEEDED, _S.FAILED, _S.STOPPED})
RESUMABLE: Final = frozenset({_S.SUSPENDED, _S.STOPPED, _S.FAILED})


def _same(states: Iterable[JobState]) -> dict[JobState, JobState]:
    return {state: state for state in states}


def _to(target: JobState, states: Iterable[JobState]) -> dict[JobState, JobState]:
    return dict.fromkeys(states, target)


TRANSITIONS: Final[Mapping[EventType, Mapping[JobState, JobState]]] = {
    _E.SUBMITTED: {},  # the first event, and no other
    _E.PREPARING: {_S.QUEUED: _S.PREPARING},
    _E.PREPARED: {_S.PREPARING: _S.PREPARING},
    _E.QUEUED: {_S.PREPARING: _S.QUEUED},
    _E.STARTING: _to(_S.STARTING, (*WAITING, _S.STARTING)),
    _E.RUNNING: {_S.STARTING: _S.RUNNING},
    _E.COMMITTED: _same(JobState),
    _E.INCIDENT: _same(JobState),
    _E.RECOVERING: _to(_S.RECOVERING, ON_NODES),
    _E.STOP_REQUESTED: _same((*ACTIVE, _S.SUSPENDED)),
    _E.SUSPEND_REQUESTED: _same(ACTIVE),
    _E.CHECKPOINT_REQUESTED: _same(ON_NODES),
    _E.RESUMED: _to(_S.QUEUED, RESUMABLE),
    _E.SUSPENDED: _to(_S.SUSPENDED, ACTIVE),
    _E.STOPPED: _to(_S.STOPPED, (*ACTIVE, _S.SUSPENDED)),
    _E.SUCCEEDED: _to(_S.SUCCEEDED, ON_NODES),
    _E.FAILED: _to(_S.FAILED, ACTIVE),
}


class Intent(StrEnum):
    """What the job's owner last asked for."""

    RUN = "run"
    STOP = "stop"
    SUSPEND = "suspend"


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a node found when it checked the job."""

    arguments: Mapping[str, Any] = field(repr=False)
    identity_digest: str
    code_digest: str
    placement: Mapping[str, Any] = field(repr=False)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """The agent process that was chosen to check the job. order: id of the order that it gets."""

    node_id: str
    instance_id: str
    order: str


@dataclass(frozen=True, slots=True)
class Start:
    """The decision to start an attempt. request_id: under which the attempt is opened, and from which its orders have
    their ids. instances: the agent process on each node. avoid_from: no checkpoint from this step on is its parent (0:
    any may be). skips: steps (first, last) whose windows are left out.
    """

    attempt: int
    request_id: str
    placement: tuple[Assignment, ...]
    instances: Mapping[str, str]
    avoid_from: int = 0
    skips: tuple[tuple[int, int], ...] = ()

    @property
    def ranks(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks of each node."""
        return {each.node_id: each.ranks for each in self.placement}

    @property
    def head(self) -> str:
        """The node of rank 0."""
        return next(each.node_id for each in self.placement if 0 in each.ranks)


@dataclass(frozen=True, slots=True)
class Ending:
    """The decision to end the ranks of an attempt that lives. order: from which the orders have their ids."""

    attempt: int
    order: str
    cause: Cause
    at_once: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A job after some of its events. revision: number of the last of them.

    start: the newest attempt's, from the decision on. first_attempt: the first that was seen to run; 0 before it.
    is_live: whether its ranks may live. best_step: the highest step that any attempt committed. num_without_progress:
    attempts in a row that began and brought no step above it. num_failed_starts: attempts in a row that did not begin.
    requests: request ids of operators and the monitor, with what they asked for. stop_order, checkpoint_order: the last
    such request, from which orders have their ids.
    """

    registered: RegisteredJob
    spec: Mapping[str, Any] = field(repr=False)
    state: JobState = JobState.QUEUED
    intent: Intent = Intent.RUN
    revision: int = 0
    preparation: Preparation | None = None
    target: Target | None = None
    attempt: int = 0
    start: Start | None = None
    first_attempt: int = 0
    is_live: bool = False
    step: int = 0
    checkpoint: CheckpointRef | None = None
    best_step: int = 0
    has_progressed: bool = False
    num_without_progress: int = 0
    num_failed_starts: int = 0
    num_failed_checks: int = 0
    cause: Cause | None = None
    message: str = ""
    ending: Ending | None = None
    avoid_from: int = 0
    skips: tuple[tuple[int, int], ...] = ()
    avoid_nodes: tuple[str, ...] = ()
    requests: Mapping[str, EventType] = field(default_factory=dict, repr=False)
    stop_order: str = ""
    checkpoint_order: str = ""

    @property
    def name(self) -> JobName:
        """What it is called."""
        return self.registered.name

    @property
    def next_attempt(self) -> int:
        """The number that its next attempt is expected to get: a fork's first attempt is the copied checkpoint."""
        return (self.attempt or (1 if self.registered.origin else 0)) + 1

    @property
    def num_steps(self) -> int:
        """Steps of the job."""
        return int(self.spec["training"]["steps"])

    @property
    def placement(self) -> tuple[Assignment, ...]:
        """Where its ranks may live; empty while it has none."""
        return self.start.placement if self.start is not None and self.is_live else ()


def begin(registered: RegisteredJob) -> Job:
    """The job before its first event."""
    return Job(registered, registered.spec)


def state_after(job: Job, kind: EventType) -> JobState | None:
    """The state that an event of that type leads to; None where it can't happen now."""
    if job.revision == 0:
        return JobState.QUEUED if kind is EventType.SUBMITTED else None
    return TRANSITIONS[kind].get(job.state)


def fold(job: Job, event: JobEvent) -> Job:
    """The job after the event. Raises DamagedObject for one that can't follow."""
    if event.number != job.revision + 1 or event.state is not state_after(job, event.type):
        raise DamagedObject(
            key_of(event.number),
            f"can't follow: {event.type} to {event.state}, where the job {job.name} is {job.state} at {job.revision}",
        )
    requests = {**job.requests, event.request_id: event.type} if event.request_id else job.requests
    told = replace(job, revision=event.number, state=event.state, requests=requests)
    if event.type not in _QUIET and event.data.get("action") not in ("notify", "skip"):
        told = replace(told, message=event.message)
    return _FOLDS[event.type](told, event)


def fold_all(registered: RegisteredJob, events: Iterable[JobEvent]) -> Job:
    """The job after all its events."""
    job = begin(registered)
    for event in events:
        job = fold(job, event)
    return job


_QUIET: Final = frozenset({_E.COMMITTED, _E.CHECKPOINT_REQUESTED})


def _submitted(job: Job, event: JobEvent) -> Job:
    return job


def _preparing(job: Job, event: JobEvent) -> Job:
    return replace(job, target=Target(event.data["node"], event.data["instance"], event.writer))


def _prepared(job: Job, event: JobEvent) -> Job:
    found = {**event.data, "warnings": tuple(event.data["warnings"])}
    return replace(job, preparation=Preparation(**found), target=None, cause=None, num_failed_checks=0)


def _queued(job: Job, event: JobEvent) -> Job:
    failed = job.num_failed_checks + (event.cause is not None)
    return replace(job, target=None, cause=event.cause, num_failed_checks=failed)


def _starting(job: Job, event: JobEvent) -> Job:
    start = Start(
        event.attempt,
        event.writer,
        event.placement,
        dict(event.data["instances"]),
        int(event.data["avoid_from"]),
        tuple((int(first), int(last)) for first, last in event.data["skips"]),
    )
    begun = replace(job, attempt=event.attempt, start=start, is_live=True, target=None)
    return replace(begun, ending=None, has_progressed=False)


def _running(job: Job, event: JobEvent) -> Job:
    """The parent is the newest live checkpoint now, be it one of which nobody had told; unless ranks committed before
    their attempt was seen to run.
    """
    parent = event.data["parent"]
    first = job.first_attempt or job.attempt
    job = replace(job, cause=None, num_failed_starts=0, avoid_from=0, first_attempt=first)
    if job.checkpoint is not None and job.checkpoint.attempt == job.attempt:
        return job
    job = replace(job, step=event.step, checkpoint=None)
    return job if parent is None else _brought(job, CheckpointRef(*parent))


def _committed(job: Job, event: JobEvent) -> Job:
    is_new = event.step > job.best_step and event.attempt == job.attempt
    job = replace(job, step=max(job.step, event.step), has_progressed=job.has_progressed or is_new)
    return _brought(job, CheckpointRef(event.attempt, event.step))


def _brought(job: Job, checkpoint: CheckpointRef) -> Job:
    is_new = checkpoint.step > job.best_step
    return replace(
        job,
        checkpoint=checkpoint,
        best_step=max(job.best_step, checkpoint.step),
        num_without_progress=0 if is_new else job.num_without_progress,
    )


def _incident(job: Job, event: JobEvent) -> Job:
    action, first, last = event.data["action"], int(event.data["first_step"]), int(event.data["last_step"])
    if action in ("skip", "roll_back") and first:
        job = replace(job, skips=_with(job.skips, (first, last)))
    if action == "roll_back":
        job = replace(job, avoid_from=min(job.avoid_from or first, first))
    if action in ("roll_back", "restart") and job.is_live and event.cause is not None:
        ending = Ending(job.attempt, event.writer, event.cause, action == "roll_back")
        job = replace(job, cause=event.cause, ending=ending)
    return job


def _with(skips: tuple[tuple[int, int], ...], added: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return skips if added in skips else (*skips, added)


def _ended(job: Job, event: JobEvent) -> Job:
    """An attempt is over, whatever follows; where there was none, nothing is counted."""
    if job.is_live:
        began = bool(event.data.get("began"))
        job = replace(
            job,
            num_without_progress=budget_after(job.num_without_progress, began=began, progressed=job.has_progressed),
            num_failed_starts=0 if began else job.num_failed_starts + 1,
            avoid_nodes=tuple(event.data.get("avoid_nodes", ())),
            step=max(event.step, job.checkpoint.step if job.checkpoint else 0),
        )
    return replace(job, is_live=False, ending=None, target=None, cause=event.cause, stop_order="", checkpoint_order="")


def _stop_requested(job: Job, event: JobEvent) -> Job:
    intent = Intent.STOP if event.type is EventType.STOP_REQUESTED else Intent.SUSPEND
    return replace(job, intent=intent, stop_order=event.writer)


def _checkpoint_requested(job: Job, event: JobEvent) -> Job:
    return replace(job, checkpoint_order=event.writer)


def _resumed(job: Job, event: JobEvent) -> Job:
    return replace(
        job,
        spec=event.data.get("spec", job.spec),
        intent=Intent.RUN,
        preparation=None,
        cause=None,
        num_without_progress=0,
        num_failed_starts=0,
        num_failed_checks=0,
        avoid_nodes=(),
    )


_FOLDS: Final = {
    _E.SUBMITTED: _submitted,
    _E.PREPARING: _preparing,
    _E.PREPARED: _prepared,
    _E.QUEUED: _queued,
    _E.STARTING: _starting,
    _E.RUNNING: _running,
    _E.COMMITTED: _committed,
    _E.INCIDENT: _incident,
    _E.RECOVERING: _ended,
    _E.STOP_REQUESTED: _stop_requested,
    _E.SUSPEND_REQUESTED: _stop_requested,
    _E.CHECKPOINT_REQUESTED: _checkpoint_requested,
    _E.RESUMED: _resumed,
    _E.SUSPENDED: _ended,
    _E.STOPPED: _ended,
    _E.SUCCEEDED: _ended,
    _E.FAILED: _ended,
}


def transition_table() -> str:
    """The table of the README: which event leads where."""
    lines = ["| event | from | to |", "|---|---|---|", f"| `{_E.SUBMITTED}` | (nothing) | `{_S.QUEUED}` |"]
    for kind, targets in TRANSITIONS.items():
        if len(targets) == len(JobState):
            lines.append(f"| `{kind}` | any | the same |")
        elif targets and all(frm is to for frm, to in targets.items()) and len(targets) > 1:
            lines.append(f"| `{kind}` | {_listed(targets)} | the same |")
        elif targets:
            lines.append(f"| `{kind}` | {_listed(targets)} | `{next(iter(targets.values()))}` |")
    return "\n".join(lines) + "\n"


def _listed(states: Iterable[JobState]) -> str:
    return ", ".join(f"`{state}`" for state in JobState if state in set(states))
