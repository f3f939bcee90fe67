"""Jobs, events and situations for the tests of the pure core."""

from __future__ import annotations

from typing import Any

from phalanx.lineage.events import Assignment, Cause, EventType, JobEvent
from phalanx.lineage.registry import RegisteredJob
from phalanx.train.decide import Agent, Decision, Phase, Record, Share, ShareEnd, Situation, decide
from phalanx.train.placement import Capacity, Demand
from phalanx.train.states import Job, begin, fold, state_after

DIGEST = "sha256:" + "0" * 64
PREPARED = {"arguments": {}, "identity_digest": DIGEST, "code_digest": DIGEST, "placement": {}, "warnings": []}
NODES = ("n1", "n2")


def registered(uid: str = "tiny", **changes: Any) -> RegisteredJob:
    """A registered job of 100 steps."""
    spec = {"training": {"steps": 100, "global_batch_size": 8}}
    fields: dict[str, Any] = {"project": "default", "uid": uid, "storage": "file:///s", "spec": spec}
    return RegisteredJob(**{**fields, "request_id": "r", "owner": "ann", **changes})


def event_of(job: Job, record: Record, request_id: str = "") -> JobEvent:
    """The event that a record becomes."""
    state = state_after(job, record.type)
    assert state is not None, f"{record.type} while {job.state}"
    return JobEvent(
        number=job.revision + 1,
        type=record.type,
        state=state,
        time="2026-01-01T00:00:00Z",
        writer=f"w{job.revision + 1}",
        attempt=record.attempt,
        step=record.step,
        request_id=request_id,
        cause=record.cause,
        message=record.message,
        placement=record.placement,
        data=record.data,
    )


def after(job: Job, record: Record, request_id: str = "") -> Job:
    """The job after what a record becomes."""
    return fold(job, event_of(job, record, request_id))


def starting(job: Job, nodes: tuple[str, ...] = ("n1",), **data: Any) -> Record:
    """A start of two ranks a node."""
    placement = tuple(Assignment(node, (2 * index, 2 * index + 1)) for index, node in enumerate(nodes))
    given = {"instances": {node: f"{node}-1" for node in nodes}, "avoid_from": 0, "skips": [], **data}
    return Record(EventType.STARTING, job.next_attempt, placement=placement, data=given)


def submitted() -> Job:
    """A queued job."""
    return after(begin(registered()), Record(EventType.SUBMITTED))


def prepared() -> Job:
    """A job that was checked."""
    job = after(submitted(), Record(EventType.PREPARING, data={"node": "n1", "instance": "n1-1"}))
    return after(job, Record(EventType.PREPARED, data=PREPARED))


def started(nodes: tuple[str, ...] = ("n1",)) -> Job:
    """A job whose attempt 1 starts."""
    job = prepared()
    return after(job, starting(job, nodes))


def running(nodes: tuple[str, ...] = ("n1",)) -> Job:
    """A job whose attempt 1 trains."""
    return after(started(nodes), Record(EventType.RUNNING, 1, data={"parent": None}))


def situation(job: Job, **changes: Any) -> Situation:
    """The job with two nodes of two free slots, whose ranks live where it has any."""
    shares = tuple(
        Share(each.node_id, Phase.LIVING, rendezvous="h:1", is_ordered=True) for each in (job.placement or ())
    )
    fields: dict[str, Any] = {
        "demand": Demand(2),
        "capacities": tuple(Capacity(node, 2) for node in NODES),
        "agents": {node: Agent(node, f"{node}-1") for node in NODES},
        "shares": shares,
    }
    return Situation(job, **{**fields, **changes})


def ended(node: str, end: ShareEnd, phase: Phase = Phase.ENDED) -> Share:
    """A share that is over."""
    return Share(node, phase, end, is_ordered=True)


def recorded(found: Decision) -> Record:
    """The one event of a decision."""
    assert len(found.actions) == 1 and isinstance(found.actions[0], Record), found
    return found.actions[0]


def decided(job: Job, **changes: Any) -> Decision:
    """What is decided about the job."""
    return decide(situation(job, **changes))


def cause(kind: str, node: str = "") -> Cause:
    """A cause of that kind."""
    return Cause(kind, "by the test", node_id=node)
