"""What goes over the wire comes back equal; every method has its roles."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_values import after, registered, running

from phalanx.api.agent.v1 import agent_service_pb2, record_pb2
from phalanx.api.train.v1 import train_service_pb2
from phalanx.core.expert_load import ExpertLoad
from phalanx.core.step_parts import Part, StepParts
from phalanx.lineage import CheckpointRef
from phalanx.lineage.events import Assignment, Cause, EventType, JobEvent, JobState
from phalanx.lineage.registry import Origin
from phalanx.rpc import access_problems
from phalanx.train.access import ACCESS
from phalanx.train.decide import Record
from phalanx.train.launch.base import GangKey, GangState, Gpu, HeldGang, Inventory, Node
from phalanx.train.records import LastSteps
from phalanx.train.recovery import REMEDIES
from phalanx.train.states import Intent
from phalanx.train.values import EvaluationView, IncidentAction, JobView, NodeView
from phalanx.train.wire import (
    cause_message,
    cause_of,
    event_message,
    event_of,
    job_message,
    job_of,
    job_view,
    node_message,
    node_of,
)

names = st.text("abc", min_size=1, max_size=5)
counts = st.integers(0, 1000)
floats = st.floats(allow_nan=False, allow_infinity=False)
causes = st.builds(
    Cause,
    kind=st.sampled_from(sorted(REMEDIES)),
    message=names,
    rank=st.none() | counts,
    signal=st.integers(0, 64),
    exit_code=st.none() | st.integers(-5, 5),
    node_id=names,
)
assignments = st.builds(Assignment, node_id=names, ranks=st.lists(counts, max_size=4).map(tuple))
checkpoints = st.builds(CheckpointRef, attempt=st.integers(1, 9), step=counts)
origins = st.builds(Origin, project=names, uid=names, attempt=st.integers(1, 9), step=counts)
views = st.builds(
    JobView,
    name=names,
    state=st.sampled_from(JobState),
    intent=st.sampled_from(Intent),
    revision=counts,
    spec=st.just({"job": {"name": "x"}}),
    owner=names,
    created=st.just("2026-01-01T00:00:00Z"),
    attempt=counts,
    step=counts,
    num_steps=counts,
    checkpoint=st.none() | checkpoints,
    cause=st.none() | causes,
    message=names,
    placement=st.lists(assignments, max_size=3).map(tuple),
    origin=st.none() | origins,
    loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    num_attempts_without_progress=counts,
    epochs=st.dictionaries(names, st.floats(0, 1e9)),
    expert_load=st.none() | st.builds(ExpertLoad, floats, floats, floats, st.none() | floats),
    evaluation=st.none()
    | st.builds(EvaluationView, counts, st.none() | floats, st.dictionaries(names, st.none() | floats, max_size=3)),
)


@given(views)
def test_job_comes_back_equal(view: JobView) -> None:
    assert job_of(job_message(view)) == view


@given(causes)
def test_cause_comes_back_equal(cause: Cause) -> None:
    message = cause_message(cause)
    assert message is not None and cause_of(message) == cause


def test_cause_of_an_unknown_kind_is_an_error() -> None:
    message = cause_message(Cause("moonquake"))
    assert message is not None and cause_of(message).kind == "error"
    assert cause_of(record_pb2.Cause(message="x")).kind == "error"


@pytest.mark.parametrize("kind", EventType)
def test_event_comes_back_equal(kind: EventType) -> None:
    event = JobEvent(3, kind, JobState.RUNNING, "2026-01-01T00:00:00Z", "w", 1, 2, "ann", "r", Cause("nan"), "m")
    found = event_of(event_message(event))
    assert (found.revision, found.type, found.state, found.time) == (3, kind, JobState.RUNNING, event.time)
    assert (found.attempt, found.step, found.actor, found.request_id, found.cause) == (1, 2, "ann", "r", Cause("nan"))


def test_node_comes_back_equal() -> None:
    inventory = Inventory("h", "1.2.3.4", 8, 64, 2**40, (Gpu("H100", "u", 80),), "d", "r", "s")
    gangs = tuple(HeldGang(GangKey("j", 1), (0, 1), state) for state in GangState)
    view = NodeView(Node("n1", "a", inventory, True, 0.5, gangs, 3), 2)
    assert node_of(node_message(view)) == view


def test_last_steps_keep_the_passes_over_each_source_of_the_newest_attempt() -> None:
    steps = LastSteps()
    for attempt, step, epochs in ((1, 4, {"web": 0.5}), (2, 3, {"web": 0.4, "code": 1.0}), (1, 5, {"web": 0.6})):
        steps.take("j", record_pb2.Record(attempt=attempt, progress=record_pb2.Progress(step=step, epochs=epochs)))
    found = steps.of("j")
    assert found is not None and (found.step, found.epochs) == (3, {"web": 0.4, "code": 1.0})


def test_last_step_carries_the_load_of_experts_and_the_attempts_last_evaluation() -> None:
    steps = LastSteps()

    def tell(attempt: int, **event: Any) -> Any:
        steps.take("j", record_pb2.Record(attempt=attempt, **event))
        return steps.of("j")

    evaluation = record_pb2.Evaluation(step=4, loss=2.0, metrics={"accuracy": 0.5, "odd": math.nan})
    assert tell(1, evaluation=evaluation) is None, "nothing is known of the attempt before its first step"
    tell(1, progress=record_pb2.Progress(step=4, experts=record_pb2.ExpertLoad(worst=2.0, mean=1.5, idle=0.25)))
    found = tell(1, evaluation=evaluation)
    assert found.experts == ExpertLoad(2.0, 1.5, 0.25)
    assert found.evaluation == EvaluationView(4, 2.0, {"accuracy": 0.5, "odd": None})
    assert tell(1, progress=record_pb2.Progress(step=5)).evaluation == found.evaluation
    overflowed = tell(1, overflow=record_pb2.Overflow(step=6, loss=1.5, loss_scale=8.0))
    assert (overflowed.step, overflowed.loss, overflowed.evaluation) == (6, 1.5, found.evaluation)
    assert tell(2, progress=record_pb2.Progress(step=1)).evaluation is None
    assert tell(1, evaluation=evaluation).evaluation is None, "what an older attempt says"


def test_every_method_has_its_roles() -> None:
    services = [
        train_service_pb2.DESCRIPTOR.services_by_name["TrainService"],
        agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"],
    ]
    assert access_problems(ACCESS, services) == []


@pytest.mark.parametrize(("kind", "prefix"), [("JobState", "JOB_STATE"), ("JobEventType", "JOB_EVENT_TYPE")])
def test_contract_and_event_log_name_the_same(kind: str, prefix: str) -> None:
    ours: Any = {"JobState": JobState, "JobEventType": EventType}[kind]
    contract = getattr(train_service_pb2, kind).keys()
    assert {f"{prefix}_{each.upper()}" for each in ours} == set(contract) - {f"{prefix}_UNSPECIFIED"}
    actions = train_service_pb2.IncidentAction.keys()
    assert {f"INCIDENT_ACTION_{each.upper()}" for each in IncidentAction} == set(actions[1:])


def test_parts_of_the_last_step_come_to_the_client_as_rank_0_told_them() -> None:
    parts = StepParts.of({Part.DATA: 0.125, Part.BACKWARD: 0.5, Part.REST: 0.25})
    told = record_pb2.Record(attempt=1)
    told.progress.CopyFrom(record_pb2.Progress(step=7, parts=record_pb2.StepParts(**asdict(parts))))
    last = LastSteps()
    last.take("projects/p/jobs/j", told)
    progress = last.of("projects/p/jobs/j")
    assert progress is not None and progress.parts == parts
    job = after(running(), Record(EventType.COMMITTED, 1, 5))
    view = job_of(job_message(job_view(job, step=7, step_parts=progress.parts)))
    assert view.step_parts == parts and view.step_parts.wall_s == 0.875


def test_view_of_a_job_shows_what_its_ranks_told_last() -> None:
    job = after(running(), Record(EventType.COMMITTED, 1, 5))
    view = job_view(job, step=7, loss=1.5, epochs={"web": 0.5})
    assert (view.step, view.loss, view.checkpoint, view.num_steps) == (7, 1.5, CheckpointRef(1, 5), 100)
    assert view.epochs == {"web": 0.5} and job_view(job).epochs == {}
    assert job_of(job_message(view)).step_parts is None
    assert view.name == str(registered().name)
    assert job_view(job).step == 5
