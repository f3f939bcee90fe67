"""What is done next about a job."""

from __future__ import annotations

from typing import Any

import pytest
from train_values import (
    DIGEST,
    after,
    cause,
    decided,
    ended,
    prepared,
    recorded,
    running,
    started,
    starting,
    submitted,
)

from phalanx.lineage import CheckpointRef
from phalanx.lineage.events import Cause, EventType, JobState
from phalanx.train.decide import (
    MERGE_S,
    Decision,
    Open,
    Opened,
    Outcome,
    Phase,
    Record,
    SendCheck,
    SendEnd,
    SendOrders,
    SendStart,
    Share,
    ShareEnd,
)
from phalanx.train.placement import Capacity
from phalanx.train.recovery import REMEDIES, Remedy
from phalanx.train.states import Job, Preparation

E = EventType
FULL = tuple(Capacity(node, 0) for node in ("n1", "n2"))
CHECKED = Preparation({}, DIGEST, DIGEST, {})
OPENED = Opened(1, None)


def failed(kind: str = "process_death", node: str = "n1", weight: int = 0) -> ShareEnd:
    return ShareEnd(Outcome.FAILED, cause(kind, node), weight)


def living(node: str) -> Share:
    return Share(node, Phase.LIVING, rendezvous="h:1", is_ordered=True)


def assigned(node: str, *, is_ordered: bool = False) -> Share:
    return Share(node, Phase.ASSIGNED, is_ordered=is_ordered)


def asked(job: Job, kind: EventType) -> Job:
    return after(job, Record(kind, job.attempt), request_id="ask")


# Before an attempt.


def test_queued_job_with_slots_is_checked_on_a_node() -> None:
    record = recorded(decided(submitted()))
    assert (record.type, record.data) == (E.PREPARING, {"node": "n1", "instance": "n1-1"})


def test_queued_job_without_slots_says_what_it_waits_for() -> None:
    assert decided(submitted(), capacities=FULL) == Decision(waits="waits for 2 slots: 0 are free, as no node has any")


def test_preparing_job_is_asked_about() -> None:
    job = after(submitted(), Record(E.PREPARING, data={"node": "n1", "instance": "n1-1"}))
    assert job.target is not None
    assert decided(job).actions == (SendCheck(job.target),)


@pytest.mark.parametrize(
    ("check", "then"),
    [
        (CHECKED, E.PREPARED),
        (cause("user_error"), E.FAILED),
        (cause("storage"), E.QUEUED),
        (cause("error"), E.QUEUED),
        (cause("node_loss"), E.QUEUED),
    ],
)
def test_preparing_job_with_an_answer_follows_it(check: Any, then: EventType) -> None:
    job = after(submitted(), Record(E.PREPARING, data={"node": "n1", "instance": "n1-1"}))
    assert recorded(decided(job, check=check)).type is then


def test_check_that_breaks_again_and_again_fails_the_job() -> None:
    job = submitted()
    for _ in range(2):
        job = after(job, Record(E.PREPARING, data={"node": "n1", "instance": "n1-1"}))
        job = after(job, Record(E.QUEUED, cause=cause("error")))
    assert decided(job).waits.startswith("waits 1 s")
    job = after(job, Record(E.PREPARING, data={"node": "n1", "instance": "n1-1"}))
    assert recorded(decided(job, check=cause("error"))).type is E.FAILED


def test_preparing_job_whose_node_is_gone_is_queued_again() -> None:
    job = after(submitted(), Record(E.PREPARING, data={"node": "n1", "instance": "n1-1"}))
    assert recorded(decided(job, target_lost="n1 went away")).type is E.QUEUED


def test_prepared_job_starts_where_it_fits() -> None:
    record = recorded(decided(prepared()))
    assert (record.type, record.attempt, record.data["instances"]) == (E.STARTING, 1, {"n1": "n1-1"})


def test_prepared_job_whose_slots_were_taken_waits_without_another_check() -> None:
    record = recorded(decided(prepared(), capacities=FULL))
    assert record.type is E.QUEUED
    job = after(prepared(), record)
    assert recorded(decided(job)).type is E.STARTING


@pytest.mark.parametrize("make", [submitted, prepared])
@pytest.mark.parametrize(("ask", "then"), [(E.STOP_REQUESTED, E.STOPPED), (E.SUSPEND_REQUESTED, E.SUSPENDED)])
def test_waiting_job_that_shall_stop_stops_at_once(make: Any, ask: EventType, then: EventType) -> None:
    assert recorded(decided(asked(make(), ask))).type is then


def test_suspended_job_that_shall_stop_stops() -> None:
    job = after(asked(submitted(), E.SUSPEND_REQUESTED), Record(E.SUSPENDED))
    assert decided(job) == Decision()
    assert recorded(decided(asked(job, E.STOP_REQUESTED))).type is E.STOPPED


# The start of an attempt.


def test_starting_job_opens_its_attempt_before_any_rank_starts() -> None:
    job = started()
    assert job.start is not None
    assert decided(job, shares=(assigned("n1"),)).actions == (Open(job.start),)


def test_starting_job_starts_rank_0_first_and_then_the_others() -> None:
    job = started(("n1", "n2"))
    assert job.start is not None
    first, second = job.start.placement
    found = decided(job, shares=(assigned("n1"), assigned("n2")), opened=OPENED)
    assert found.actions == (SendStart(first, ""),)
    found = decided(job, shares=(living("n1"), assigned("n2")), opened=OPENED)
    assert found.actions == (SendStart(first, ""), SendStart(second, "h:1"))


def test_starting_job_whose_number_was_taken_goes_on_under_the_next() -> None:
    record = recorded(decided(started(), shares=(assigned("n1"),), opened=Opened(2, CheckpointRef(1, 5))))
    assert (record.type, record.attempt) == (E.STARTING, 2)


@pytest.mark.parametrize(("parent", "step"), [(None, 0), (CheckpointRef(1, 5), 5)])
def test_starting_job_runs_with_the_first_word_of_a_rank(parent: CheckpointRef | None, step: int) -> None:
    record = recorded(decided(started(), opened=Opened(1, parent), has_reported=True))
    assert (record.type, record.step) == (E.RUNNING, step)
    assert record.data == {"parent": [1, 5] if parent else None}


def test_commit_whose_teller_died_is_an_event_before_the_next_attempt_runs() -> None:
    job = after(running(), Record(E.COMMITTED, 1, 5))
    job = after(job, Record(E.RECOVERING, 1, 12, cause("process_death"), data={"began": True, "avoid_nodes": []}))
    job = after(job, starting(job))
    opened = Opened(2, CheckpointRef(1, 10))
    record = recorded(decided(job, opened=opened, has_reported=True))
    assert (record.type, record.attempt, record.step) == (E.COMMITTED, 1, 10)
    record = recorded(decided(after(job, record), opened=opened, has_reported=True))
    assert (record.type, record.attempt, record.step) == (E.RUNNING, 2, 10)


@pytest.mark.parametrize("parent", [CheckpointRef(1, 5), CheckpointRef(1, 3)], ids=["told", "older"])
def test_checkpoint_that_was_told_or_is_gone_back_to_is_not_told_again(parent: CheckpointRef) -> None:
    job = after(running(), Record(E.COMMITTED, 1, 5))
    job = after(job, Record(E.RECOVERING, 1, 12, cause("process_death"), data={"began": True, "avoid_nodes": []}))
    job = after(job, starting(job))
    assert recorded(decided(job, opened=Opened(2, parent), has_reported=True)).type is E.RUNNING


def test_imported_checkpoint_is_no_commit_of_this_job() -> None:
    job = started()
    job = after(job, starting(job))
    assert recorded(decided(job, opened=Opened(2, CheckpointRef(1, 5)), has_reported=True)).type is E.RUNNING


def test_word_of_a_rank_counts_once_the_ranks_of_all_nodes_live() -> None:
    job = started(("n1", "n2"))
    found = decided(job, shares=(living("n1"), assigned("n2")), opened=OPENED, has_reported=True)
    assert all(isinstance(action, SendStart) for action in found.actions)
    assert recorded(decided(job, opened=OPENED, has_reported=True)).type is E.RUNNING


def test_attempt_that_cannot_be_opened_fails_the_job() -> None:
    record = recorded(decided(started(), shares=(assigned("n1"),), opened=cause("user_error")))
    assert record.type is E.FAILED


def test_start_that_was_refused_does_not_count_against_the_budget() -> None:
    record = recorded(decided(started(), opened=OPENED, shares=(ended("n1", failed("error"), Phase.REFUSED),)))
    assert (record.type, record.data["began"], record.data["avoid_nodes"]) == (E.RECOVERING, False, ["n1"])
    assert after(started(), record).num_without_progress == 0


def test_starting_job_of_which_nothing_was_sent_stops_at_once() -> None:
    job = asked(started(), E.STOP_REQUESTED)
    assert recorded(decided(job, shares=(assigned("n1"),))).type is E.STOPPED


# The end of an attempt.


def test_gang_that_finished_everywhere_succeeds() -> None:
    end = ShareEnd(Outcome.FINISHED, last_step=100, committed_step=0)
    assert recorded(decided(running(), shares=(ended("n1", end),))).type is E.SUCCEEDED


def test_commit_that_nobody_told_of_is_an_event_first() -> None:
    end = ShareEnd(Outcome.FINISHED, last_step=100, committed_step=100)
    job = running()
    record = recorded(decided(job, shares=(ended("n1", end),)))
    assert (record.type, record.step) == (E.COMMITTED, 100)
    assert recorded(decided(after(job, record), shares=(ended("n1", end),))).type is E.SUCCEEDED


def test_job_is_not_over_while_rank_0_has_not_finished() -> None:
    shares = (living("n1"), ended("n2", ShareEnd(Outcome.FINISHED)))
    assert decided(running(("n1", "n2")), shares=shares, ending_s=10 * MERGE_S).actions == ()


def test_job_whose_rank_0_finished_does_not_wait_for_ever_for_the_others() -> None:
    shares = (ended("n1", ShareEnd(Outcome.FINISHED)), living("n2"))
    assert decided(running(("n1", "n2")), shares=shares, ending_s=0.0).actions == ()
    assert recorded(decided(running(("n1", "n2")), shares=shares, ending_s=MERGE_S)).type is E.SUCCEEDED


@pytest.mark.parametrize("kind", sorted(REMEDIES))
def test_gang_that_failed_follows_the_remedy_of_its_cause(kind: str) -> None:
    record = recorded(decided(running(), shares=(ended("n1", failed(kind)),)))
    assert record.type is (E.FAILED if REMEDIES[kind] is Remedy.GIVE_UP else E.RECOVERING)
    assert record.cause is not None and record.cause.kind == kind
    avoided = record.data.get("avoid_nodes")
    assert avoided == {Remedy.OTHER_NODE: ["n1"], Remedy.GIVE_UP: None}.get(REMEDIES[kind], [])


def test_failure_on_one_node_ends_the_ranks_of_the_others() -> None:
    shares = (ended("n1", failed()), living("n2"))
    found = decided(running(("n1", "n2")), shares=shares)
    assert [(type(each), getattr(each, "node_id", "")) for each in found.actions] == [(SendEnd, "n2")]


@pytest.mark.parametrize(
    ("first", "second", "wins"),
    [
        ((2, "lost_peer"), (0, "hang"), "hang"),
        ((0, "error"), (0, "hang"), "error"),
        ((1, "process_death"), (2, "lost_peer"), "process_death"),
    ],
)
def test_cause_that_says_most_wins_over_all_nodes(first: tuple[int, str], second: tuple[int, str], wins: str) -> None:
    shares = tuple(ended(node, failed(kind, node, weight)) for node, (weight, kind) in (("n1", first), ("n2", second)))
    record = recorded(decided(running(("n1", "n2")), shares=shares))
    assert record.cause is not None and record.cause.kind == wins


def test_node_that_never_tells_its_cause_is_not_waited_for_for_ever() -> None:
    shares = (ended("n1", failed()), living("n2"))
    assert recorded(decided(running(("n1", "n2")), shares=shares, ending_s=MERGE_S)).type is E.RECOVERING


def test_lost_node_is_avoided_by_the_next_attempt() -> None:
    lost = ended("n1", failed("node_loss", "n1", 1), Phase.LOST)
    job = running()
    job = after(job, recorded(decided(job, shares=(lost,))))
    assert (job.state, job.avoid_nodes) == (JobState.RECOVERING, ("n1",))


def test_budget_that_is_used_up_gives_the_job_up() -> None:
    job = running()
    for number in (1, 2, 3):
        record = recorded(decided(job, shares=(ended("n1", failed()),)))
        assert record.type is (E.FAILED if number == 3 else E.RECOVERING)
        job = after(job, record)
        if number < 3:
            job = after(job, starting(job))
            job = after(job, Record(E.RUNNING, job.attempt, data={"parent": None}))
    assert "3 attempts in a row" in job.message


def test_gang_whose_node_was_told_to_end_goes_on_elsewhere() -> None:
    record = recorded(decided(running(), shares=(ended("n1", ShareEnd(Outcome.STOPPED)),)))
    assert (record.type, record.cause) == (E.RECOVERING, Cause("interrupted", "its node was told to end"))


# What operators ask for.


@pytest.mark.parametrize("kind", [E.STOP_REQUESTED, E.SUSPEND_REQUESTED])
def test_running_job_that_shall_stop_is_told_so_by_rank_0s_node(kind: EventType) -> None:
    job = asked(running(("n1", "n2")), kind)
    assert decided(job).actions == (SendOrders("n1", job.stop_order, stop=True),)


def test_running_job_that_does_not_stop_is_ended_after_its_grace() -> None:
    job = asked(running(), E.STOP_REQUESTED)
    actions = decided(job, stopping_s=60.0, grace_s=60.0).actions
    assert [type(action) for action in actions] == [SendOrders, SendEnd]


@pytest.mark.parametrize(
    "end", [ShareEnd(Outcome.STOPPED), failed("interrupted"), failed("process_death"), failed("user_error")]
)
@pytest.mark.parametrize(("kind", "then"), [(E.STOP_REQUESTED, E.STOPPED), (E.SUSPEND_REQUESTED, E.SUSPENDED)])
def test_job_that_shall_stop_is_never_started_again(end: ShareEnd, kind: EventType, then: EventType) -> None:
    job = asked(running(), kind)
    record = recorded(decided(job, shares=(ended("n1", end),)))
    assert (record.type, record.cause) == (then, end.cause)


def test_job_that_finished_before_it_could_stop_has_succeeded() -> None:
    job = asked(running(), E.STOP_REQUESTED)
    assert recorded(decided(job, shares=(ended("n1", ShareEnd(Outcome.FINISHED)),))).type is E.SUCCEEDED


def test_running_job_passes_the_wish_for_a_checkpoint_on() -> None:
    job = asked(running(), E.CHECKPOINT_REQUESTED)
    assert decided(job).actions == (SendOrders("n1", job.checkpoint_order, checkpoint=True),)


# What the monitor says.


@pytest.mark.parametrize(("action", "grace_s"), [("roll_back", 0.0), ("restart", 30.0)])
def test_verdict_that_ends_the_attempt_ends_its_ranks(action: str, grace_s: float) -> None:
    data = {"action": action, "first_step": 4, "last_step": 4}
    job = after(running(), Record(E.INCIDENT, 1, 4, cause("nan"), data=data), "i1")
    (end,) = decided(job).actions
    assert isinstance(end, SendEnd) and (end.node_id, end.grace_s) == ("n1", grace_s)
    stopped = ended("n1", ShareEnd(Outcome.STOPPED, cause("interrupted"), 2))
    record = recorded(decided(job, shares=(stopped,)))
    assert record.type is E.RECOVERING and record.cause == cause("nan")


def test_next_attempt_after_a_roll_back_avoids_the_steps_and_leaves_their_windows_out() -> None:
    data = {"action": "roll_back", "first_step": 4, "last_step": 6}
    job = after(running(), Record(E.INCIDENT, 1, 4, cause("nan"), data=data), "i1")
    job = after(job, recorded(decided(job, shares=(ended("n1", ShareEnd(Outcome.STOPPED)),))))
    record = recorded(decided(job))
    assert (record.type, record.data["avoid_from"], record.data["skips"]) == (E.STARTING, 4, [[4, 6]])


def test_user_error_that_ends_the_attempt_first_is_the_cause() -> None:
    data = {"action": "restart", "first_step": 0, "last_step": 0}
    job = after(running(), Record(E.INCIDENT, 1, 0, cause("straggler"), data=data), "i1")
    assert recorded(decided(job, shares=(ended("n1", failed("user_error")),))).type is E.FAILED
