"""What is to be done next about one job: pure. Snapshot -> decide -> commit.

A decision is an event to record, or orders that must be on their way; orders are named after the event that asks for
them, so that giving one twice is giving it once. Whoever carries decisions out calls again after each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from phalanx.lineage import CheckpointRef
from phalanx.lineage.events import Assignment, Cause, EventType, JobState
from phalanx.train.placement import Capacity, Demand, Misfit, Placement, place
from phalanx.train.recovery import Remedy, is_exhausted, remedy_of
from phalanx.train.states import ON_NODES, WAITING, Intent, Job, Preparation, Start, Target
from phalanx.train.turns import pause_s

PEERS_GRACE_S: Final = 2.0  # for the ranks of other nodes, once one node's have failed
MERGE_S: Final = 10.0  # how long the first cause is awaited from the other nodes
RESTART_GRACE_S: Final = 30.0
MAX_FAILED_CHECKS: Final = 3


class Phase(StrEnum):
    """Where the ranks of an attempt on one node stand."""

    ASSIGNED = "assigned"
    LIVING = "living"
    ENDED = "ended"
    LOST = "lost"
    REFUSED = "refused"


class Outcome(StrEnum):
    """How the ranks of a node ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ShareEnd:
    """How the ranks of an attempt ended on a node. weight: how little the cause says (`gang.cause.Weight`)."""

    outcome: Outcome
    cause: Cause | None = None
    weight: int = 0
    last_step: int = 0
    committed_step: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks of an attempt on one node. end: once they are over, lost or refused. rendezvous: of rank 0's node, once
    they live. is_ordered: whether their start may have reached the node.
    """

    node_id: str
    phase: Phase
    end: ShareEnd | None = None
    rendezvous: str = ""
    is_ordered: bool = False


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent that orders can reach now."""

    node_id: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Opened:
    """The attempt in storage. number: may be another than planned where somebody else had taken that one."""

    number: int
    parent: CheckpointRef | None


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a decision follows from. check: the answer of the node that checks the job. opened: the attempt in
    storage, where this process has opened it. has_reported: whether ranks of the attempt have told something. age_s:
    since the last decision. stopping_s, ending_s: since the stop was asked for, since the first node's ranks were over.
    target_lost: why the node that checks the job will not answer.
    """

    job: Job
    demand: Demand
    capacities: tuple[Capacity, ...]
    agents: Mapping[str, Agent]
    shares: tuple[Share, ...] = ()
    check: Preparation | Cause | None = None
    target_lost: str = ""
    opened: Opened | Cause | None = None
    has_reported: bool = False
    age_s: float = 0.0
    stopping_s: float = 0.0
    ending_s: float = 0.0
    grace_s: float = 60.0
    max_without_progress: int = 3


@dataclass(frozen=True, slots=True)
class Record:
    """An event to write, before anything that follows from it is done."""

    type: EventType
    attempt: int = 0
    step: int = 0
    cause: Cause | None = None
    message: str = ""
    placement: Placement = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SendCheck:
    """Have a node check the job."""

    target: Target


@dataclass(frozen=True, slots=True)
class Open:
    """Open the attempt in storage, with the journal entries that the start asks for."""

    start: Start


@dataclass(frozen=True, slots=True)
class SendStart:
    """Start the ranks of a node. rendezvous: "" on the node of rank 0."""

    assignment: Assignment
    rendezvous: str


@dataclass(frozen=True, slots=True)
class SendOrders:
    """Pass an order to the ranks, by the node of rank 0."""

    node_id: str
    order: str
    stop: bool = False
    checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class SendEnd:
    """End the ranks of a node."""

    node_id: str
    order: str
    grace_s: float
    why: str


Action = Record | SendCheck | Open | SendStart | SendOrders | SendEnd


@dataclass(frozen=True, slots=True)
class Decision:
    """actions: a record stands alone. waits: what is waited for, in one line; "" where the state says it all."""

    actions: tuple[Action, ...] = ()
    waits: str = ""


def decide(situation: Situation) -> Decision:
    """What is to be done next."""
    job = situation.job
    if job.state in ON_NODES:
        return _on_nodes(situation)
    if job.state in WAITING and job.intent is not Intent.RUN:
        return _recorded(Record(_asked(job), attempt=job.attempt, step=job.step))
    if job.state is JobState.PREPARING:
        return _preparing(situation)
    if job.state in WAITING:
        return _waiting(situation)
    if job.state is JobState.SUSPENDED and job.intent is Intent.STOP:
        return _recorded(Record(EventType.STOPPED, attempt=job.attempt, step=job.step))
    return Decision()


def _recorded(record: Record) -> Decision:
    return Decision((record,))


def _asked(job: Job) -> EventType:
    return EventType.STOPPED if job.intent is Intent.STOP else EventType.SUSPENDED


# Before an attempt.


def _waiting(situation: Situation) -> Decision:
    job = situation.job
    pause = pause_s(job)
    if situation.age_s < pause:
        return Decision(waits=f"waits {pause:g} s before the next try")
    found = place(situation.demand, situation.capacities)
    if isinstance(found, Misfit):
        return Decision(waits=found.why)
    if job.preparation is not None:
        return _recorded(_start(situation, found))
    agent = situation.agents[found[0].node_id]
    data = {"node": agent.node_id, "instance": agent.instance_id}
    return _recorded(Record(EventType.PREPARING, message=f"checked on {agent.node_id}", data=data))


def _preparing(situation: Situation) -> Decision:
    job, check = situation.job, situation.check
    if job.preparation is not None:
        found = place(situation.demand, situation.capacities)
        if isinstance(found, Misfit):
            return _recorded(Record(EventType.QUEUED, message=found.why))
        return _recorded(_start(situation, found))
    assert job.target is not None
    if isinstance(check, Preparation):
        return _recorded(Record(EventType.PREPARED, message="; ".join(check.warnings), data=_plain(check)))
    if isinstance(check, Cause):
        is_final = check.kind == "user_error" or (
            check.kind == "error" and job.num_failed_checks + 1 >= MAX_FAILED_CHECKS
        )
        kind = EventType.FAILED if is_final else EventType.QUEUED
        return _recorded(Record(kind, cause=check, message=check.message))
    if situation.target_lost:
        return _recorded(Record(EventType.QUEUED, message=situation.target_lost))
    return Decision((SendCheck(job.target),), f"{job.target.node_id} checks it")


def _plain(check: Preparation) -> Mapping[str, Any]:
    return {
        "arguments": dict(check.arguments),
        "identity_digest": check.identity_digest,
        "code_digest": check.code_digest,
        "placement": dict(check.placement),
        "warnings": list(check.warnings),
    }


def _start(situation: Situation, found: Placement) -> Record:
    job = situation.job
    data = {
        "instances": {each.node_id: situation.agents[each.node_id].instance_id for each in found},
        "avoid_from": job.avoid_from,
        "skips": [list(skip) for skip in job.skips],
    }
    return Record(EventType.STARTING, attempt=job.next_attempt, placement=found, data=data)


# While an attempt has its nodes.


def _on_nodes(situation: Situation) -> Decision:
    job = situation.job
    start = job.start
    assert start is not None
    ends = [share.end for share in situation.shares if share.end is not None]
    has_failed = any(end.outcome is Outcome.FAILED for end in ends)
    is_never_sent = not any(share.is_ordered for share in situation.shares)
    is_settled = has_failed or any(share.node_id == start.head and share.end for share in situation.shares)
    if len(ends) == len(situation.shares) or (is_settled and situation.ending_s >= MERGE_S):
        return _conclude(situation)
    if isinstance(situation.opened, Cause) or (is_never_sent and job.intent is not Intent.RUN):
        return _conclude(situation)
    if has_failed:
        return Decision(tuple(_end_all(situation, f"{start.request_id}/failed", PEERS_GRACE_S, "another node failed")))
    if job.ending is not None:
        grace_s = 0.0 if job.ending.at_once else RESTART_GRACE_S
        return Decision(tuple(_end_all(situation, job.ending.order, grace_s, str(job.ending.cause))))
    if job.state is JobState.STARTING:
        return _starting(situation, start)
    return Decision(tuple(_orders(situation, start)))


def _starting(situation: Situation, start: Start) -> Decision:
    opened, job = situation.opened, situation.job
    if opened is None:
        return Decision((Open(start),), "opens the attempt")
    assert isinstance(opened, Opened)
    if opened.number != start.attempt:
        message = f"attempt {start.attempt} was opened by somebody else; going on as attempt {opened.number}"
        again = {"instances": dict(start.instances), "avoid_from": start.avoid_from, "skips": _skips(start)}
        return _recorded(
            Record(EventType.STARTING, opened.number, message=message, placement=start.placement, data=again)
        )
    if situation.has_reported and all(share.phase is Phase.LIVING for share in situation.shares):
        parent = opened.parent
        if parent is not None and _is_untold(job, parent):
            return _recorded(Record(EventType.COMMITTED, parent.attempt, parent.step))
        begins = f"from {parent}" if parent else "from the beginning"
        data = {"parent": [parent.attempt, parent.step] if parent else None}
        return _recorded(
            Record(EventType.RUNNING, job.attempt, parent.step if parent else 0, message=begins, data=data)
        )
    return Decision((*_starts(situation, start), *_orders(situation, start)), "its ranks start")


def _is_untold(job: Job, parent: CheckpointRef) -> bool:
    """Whether it was committed by an attempt of this job, and who did so died before it could tell."""
    known = job.checkpoint
    is_newer = known is None or (parent.attempt, parent.step) > (known.attempt, known.step)
    return is_newer and 0 < job.first_attempt <= parent.attempt < job.attempt


def _skips(start: Start) -> list[list[int]]:
    return [list(skip) for skip in start.skips]


def _starts(situation: Situation, start: Start) -> Iterator[SendStart]:
    """Rank 0's node first; the others once it has said where they meet."""
    rendezvous = next(share.rendezvous for share in situation.shares if share.node_id == start.head)
    for assignment in start.placement:
        if assignment.node_id == start.head:
            yield SendStart(assignment, "")
        elif rendezvous:
            yield SendStart(assignment, rendezvous)


def _orders(situation: Situation, start: Start) -> Iterator[Action]:
    """What operators asked for."""
    job = situation.job
    head = next(share for share in situation.shares if share.node_id == start.head)
    if head.phase is Phase.LIVING:
        if job.intent is not Intent.RUN:
            yield SendOrders(start.head, job.stop_order, stop=True)
        if job.checkpoint_order:
            yield SendOrders(start.head, job.checkpoint_order, checkpoint=True)
    if job.intent is not Intent.RUN and situation.stopping_s >= situation.grace_s:
        yield from _end_all(situation, f"{job.stop_order}/grace", 0.0, "the grace to stop is over")


def _end_all(situation: Situation, order: str, grace_s: float, why: str) -> Iterator[SendEnd]:
    for share in situation.shares:
        if share.end is None and share.is_ordered:
            yield SendEnd(share.node_id, f"{order}/{share.node_id}", grace_s, why)


def _conclude(situation: Situation) -> Decision:
    job, ends = situation.job, [share.end for share in situation.shares if share.end is not None]
    committed = max((end.committed_step for end in ends), default=0)
    known = job.checkpoint.step if job.checkpoint and job.checkpoint.attempt == job.attempt else 0
    if committed > known:
        return _recorded(Record(EventType.COMMITTED, job.attempt, committed))
    head = next(share.end for share in situation.shares if job.start and share.node_id == job.start.head)
    cause = _cause(situation, ends)
    step = max((end.last_step for end in ends), default=0)
    if head is not None and head.outcome is Outcome.FINISHED:
        return _recorded(Record(EventType.SUCCEEDED, job.attempt, max(step, job.step)))
    began = job.state is JobState.RUNNING
    data: dict[str, Any] = {"began": began}
    if job.intent is not Intent.RUN:
        message = f"before a checkpoint was committed: {cause.message}" if cause else ""
        return _recorded(Record(_asked(job), job.attempt, step, cause, message, data=data))
    cause = cause or Cause("interrupted", "its node was told to end")
    remedy = remedy_of(cause)
    spent = job.num_without_progress + (began and not job.has_progressed)
    if remedy is Remedy.GIVE_UP:
        return _recorded(Record(EventType.FAILED, job.attempt, step, cause, cause.message, data=data))
    if is_exhausted(spent, situation.max_without_progress):
        message = f"given up after {spent} attempts in a row without a new checkpoint"
        return _recorded(Record(EventType.FAILED, job.attempt, step, cause, message, data=data))
    data["avoid_nodes"] = list(_avoided(situation, cause, remedy))
    return _recorded(Record(EventType.RECOVERING, job.attempt, step, cause, str(remedy), data=data))


def _cause(situation: Situation, ends: list[ShareEnd]) -> Cause | None:
    """The first cause over all nodes: what the service itself ended the attempt for, else the weightiest."""
    if isinstance(situation.opened, Cause):
        return situation.opened
    told = [end for end in ends if end.cause is not None]
    first = min(told, key=lambda end: end.weight).cause if told else None
    if situation.job.ending is not None and (first is None or first.kind != "user_error"):
        return situation.job.ending.cause
    return first


def _avoided(situation: Situation, cause: Cause, remedy: Remedy) -> tuple[str, ...]:
    lost = {share.node_id for share in situation.shares if share.phase in (Phase.LOST, Phase.REFUSED)}
    blamed = {cause.node_id} if remedy is Remedy.OTHER_NODE and cause.node_id else set()
    return tuple(sorted(lost | blamed))
