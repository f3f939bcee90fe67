"""A job as the fold of its events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from train_values import PREPARED, after, event_of, prepared, registered, running, started, starting, submitted

import phalanx.train
from phalanx.lineage import CheckpointRef, DamagedObject
from phalanx.lineage.documents import decode_document, encode_document
from phalanx.lineage.events import Cause, EventType, JobEvent, JobState
from phalanx.train.decide import Record
from phalanx.train.recovery import remedy_table
from phalanx.train.states import (
    ACTIVE,
    ON_NODES,
    OVER,
    RESUMABLE,
    TRANSITIONS,
    Intent,
    Job,
    begin,
    fold,
    fold_all,
    state_after,
    transition_table,
)

E, S = EventType, JobState
DATA: dict[EventType, dict[str, Any]] = {
    E.PREPARING: {"node": "n1", "instance": "n1-1"},
    E.PREPARED: PREPARED,
    E.RUNNING: {"parent": None},
    E.INCIDENT: {"action": "notify", "first_step": 0, "last_step": 0},
}


def record(job: Job, kind: EventType, **fields: Any) -> Record:
    if kind is E.STARTING:
        return starting(job)
    return Record(kind, job.attempt, data=fields.pop("data", DATA.get(kind, {})), **fields)


class AnyEvents(RuleBasedStateMachine):
    """Whatever may happen next happens."""

    @initialize()
    def submit(self) -> None:
        self.job, self.events = begin(registered()), []
        self.write(Record(E.SUBMITTED))

    def write(self, told: Record, request_id: str = "") -> None:
        event = event_of(self.job, told, request_id)
        self.events.append(event)
        self.job = fold(self.job, event)

    @rule(kind=st.sampled_from(EventType), step=st.integers(0, 50), began=st.booleans(), has_cause=st.booleans())
    def happen(self, kind: EventType, step: int, began: bool, has_cause: bool) -> None:
        if state_after(self.job, kind) is None:
            with pytest.raises(DamagedObject):
                fold(self.job, JobEvent(self.job.revision + 1, kind, self.job.state, "t", "w"))
            return
        told = record(self.job, kind)
        data = {**told.data, "began": began} if kind in (E.RECOVERING, E.FAILED) else told.data
        why = Cause("error", "x") if has_cause else None
        self.write(Record(kind, told.attempt, step, why, "", told.placement, data), request_id=f"r{len(self.events)}")

    @precondition(lambda self: self.job.is_live)
    @rule(action=st.sampled_from(["notify", "skip", "roll_back", "restart"]), first=st.integers(1, 40))
    def judge(self, action: str, first: int) -> None:
        data = {"action": action, "first_step": first, "last_step": first + 2}
        self.write(Record(E.INCIDENT, self.job.attempt, first, Cause("nan", "x"), data=data))

    @invariant()
    def fold_of_what_is_stored_is_the_job(self) -> None:
        stored = [decode_document(JobEvent, "event", encode_document(event)) for event in self.events]
        assert fold_all(registered(), stored) == self.job

    @invariant()
    def ranks_live_only_where_an_attempt_stands(self) -> None:
        assert bool(self.job.placement) == (self.job.state in ON_NODES) == self.job.is_live
        assert self.job.ending is None or self.job.is_live
        assert self.job.target is None or self.job.state is S.PREPARING

    @invariant()
    def numbers_only_grow_where_they_must(self) -> None:
        assert self.job.revision == len(self.events)
        assert self.job.best_step >= (self.job.checkpoint.step if self.job.checkpoint else 0)
        assert self.job.num_without_progress >= 0

    @invariant()
    def a_job_that_is_over_stays_so_until_it_is_resumed(self) -> None:
        if self.job.state in OVER:
            may = {kind for kind in EventType if state_after(self.job, kind) not in (None, self.job.state)}
            assert may <= {E.RESUMED}


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("kind", EventType)
@pytest.mark.parametrize("state", JobState)
def test_event_in_a_state_leads_where_the_table_says(kind: EventType, state: JobState) -> None:
    target = TRANSITIONS[kind].get(state)
    if kind is E.SUBMITTED:
        assert target is None
    if target is not None and target is not state:
        assert state in ACTIVE or state in RESUMABLE


@pytest.mark.parametrize("state", sorted(OVER))
def test_job_that_is_over_is_left_only_by_resume(state: JobState) -> None:
    leaving = {kind for kind, targets in TRANSITIONS.items() if targets.get(state) not in (None, state)}
    assert leaving == ({E.RESUMED} if state in RESUMABLE else set())


def test_event_of_another_number_is_damaged() -> None:
    event = event_of(submitted(), record(submitted(), E.PREPARING))
    with pytest.raises(DamagedObject, match="can't follow"):
        fold(prepared(), event)


def test_commit_of_a_new_step_is_progress() -> None:
    job = after(running(), Record(E.COMMITTED, 1, 10))
    assert (job.checkpoint, job.step, job.best_step, job.has_progressed) == (CheckpointRef(1, 10), 10, 10, True)
    job = after(job, Record(E.RECOVERING, 1, 12, Cause("error"), data={"began": True}))
    assert (job.num_without_progress, job.state, job.placement) == (0, S.RECOVERING, ())


def test_attempts_without_a_new_step_are_counted_and_reset_by_one() -> None:
    job = running()
    for number in (1, 2):
        job = after(job, Record(E.RECOVERING, number, cause=Cause("error"), data={"began": True}))
        assert job.num_without_progress == number
        job = after(job, starting(job))
        job = after(job, Record(E.RUNNING, job.attempt, data={"parent": None}))
    assert after(job, Record(E.COMMITTED, 3, 4)).num_without_progress == 0


def test_commit_of_a_step_that_was_reached_before_is_no_progress() -> None:
    job = after(running(), Record(E.COMMITTED, 1, 10))
    job = after(job, Record(E.RECOVERING, 1, 12, Cause("nan"), data={"began": True}))
    job = after(job, starting(job, avoid_from=8))
    job = after(job, Record(E.RUNNING, 2, 5, data={"parent": [1, 5]}))
    assert job.checkpoint == CheckpointRef(1, 5)
    job = after(job, Record(E.COMMITTED, 2, 10))
    assert not job.has_progressed
    job = after(job, Record(E.RECOVERING, 2, 12, Cause("nan"), data={"began": True}))
    assert job.num_without_progress == 1


def test_attempt_that_never_began_is_not_counted() -> None:
    job = after(started(), Record(E.RECOVERING, 1, cause=Cause("error"), data={"began": False}))
    assert (job.num_without_progress, job.num_failed_starts) == (0, 1)


def test_parent_that_nobody_told_of_counts_as_progress_of_the_past() -> None:
    job = after(running(), Record(E.RECOVERING, 1, cause=Cause("node_loss"), data={"began": True}))
    job = after(job, starting(job))
    job = after(job, Record(E.RUNNING, 2, 15, data={"parent": [1, 15]}))
    assert (job.num_without_progress, job.best_step, job.has_progressed) == (0, 15, False)


def test_commit_before_the_attempt_is_seen_to_run_is_kept() -> None:
    job = after(running(), Record(E.COMMITTED, 1, 5))
    job = after(job, Record(E.RECOVERING, 1, 6, Cause("error"), data={"began": True}))
    job = after(after(job, starting(job)), Record(E.COMMITTED, 2, 10))
    job = after(job, Record(E.RUNNING, 2, 5, data={"parent": [1, 5]}))
    assert (job.checkpoint, job.step) == (CheckpointRef(2, 10), 10)


def test_roll_back_is_remembered_until_an_attempt_runs() -> None:
    data = {"action": "roll_back", "first_step": 8, "last_step": 9}
    job = after(running(), Record(E.INCIDENT, 1, 8, Cause("nan"), data=data))
    assert (job.avoid_from, job.skips) == (8, ((8, 9),))
    assert job.ending is not None and job.ending.at_once
    job = after(job, Record(E.RECOVERING, 1, 9, Cause("nan"), data={"began": True}))
    job = after(job, starting(job, avoid_from=job.avoid_from, skips=[list(skip) for skip in job.skips]))
    assert job.start is not None and (job.start.avoid_from, job.start.skips, job.avoid_from) == (8, ((8, 9),), 8)
    job = after(job, Record(E.RUNNING, 2, 5, data={"parent": [1, 5]}))
    assert (job.avoid_from, job.skips) == (0, ((8, 9),))


def test_resume_takes_the_new_job_file_and_checks_it_anew() -> None:
    job = after(after(running(), Record(E.STOP_REQUESTED, 1)), Record(E.STOPPED, 1))
    spec = {"training": {"steps": 200, "global_batch_size": 8}}
    job = after(job, Record(E.RESUMED, 1, data={"spec": spec}))
    assert (job.num_steps, job.preparation, job.intent, job.state) == (200, None, Intent.RUN, S.QUEUED)


def test_fork_expects_its_first_attempt_behind_the_copied_checkpoint() -> None:
    from phalanx.lineage.registry import Origin

    assert begin(registered(origin=Origin("default", "old", 3, 10))).next_attempt == 2
    assert begin(registered()).next_attempt == 1


@pytest.mark.parametrize("table", [transition_table, remedy_table])
def test_readme_holds_the_generated_tables(table: Any) -> None:
    readme = Path(phalanx.train.__file__).with_name("README.md").read_text()
    assert table() in readme
