"""Whose turn it is: the oldest job that waits, and what one that pauses keeps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from train_values import after, cause, decided, ended, recorded, registered, running, situation, submitted

from phalanx.lineage.events import EventType, JobState
from phalanx.train.decide import Decision, Outcome, Record, ShareEnd, decide
from phalanx.train.launch.base import Inventory, Node
from phalanx.train.shares import capacities
from phalanx.train.states import Job
from phalanx.train.turns import CLAIM_MARGIN_S, age, claimed_slots, in_turn, pause_s


def made(job: Job, uid: str, created: str) -> Job:
    return replace(job, registered=registered(uid, created=created))


def recovering(num_failed_starts: int) -> Job:
    """A job whose rank died, after so many starts in a row that came to nothing."""
    share = ended("n1", ShareEnd(Outcome.FAILED, cause("process_death", "n1")))
    job = after(running(), recorded(decided(running(), shares=(share,))))
    return replace(job, num_failed_starts=num_failed_starts)


def test_jobs_that_wait_are_asked_by_submission_whatever_their_names_and_states() -> None:
    jobs = [
        made(submitted(), "z", "2026-01-01T00:00:01Z"),
        made(recovering(3), "y", "2026-01-01T00:00:02Z"),
        made(submitted(), "b", "2026-01-01T00:00:03Z"),
        made(submitted(), "c", "2026-01-01T00:00:03Z"),
        made(recovering(0), "a", "2026-01-01T00:00:04Z"),
    ]
    for seed in range(5):
        shuffled = random.Random(seed).sample(jobs, len(jobs))
        assert [job.name.uid for job in in_turn(shuffled)] == ["z", "y", "b", "c", "a"]


def test_jobs_on_nodes_are_asked_first_as_their_end_frees_slots() -> None:
    waits = made(submitted(), "a", "2026-01-01T00:00:01Z")
    lives = made(running(), "b", "2026-01-01T00:00:02Z")
    assert in_turn([waits, lives]) == [lives, waits]


@pytest.mark.parametrize(
    ("waited_s", "is_claimed"), [(0.0, True), (4.0 + CLAIM_MARGIN_S - 0.1, True), (4.0 + CLAIM_MARGIN_S, False)]
)
def test_older_job_that_pauses_keeps_its_slots_from_younger_ones_until_it_was_asked_again(
    waited_s: float, is_claimed: bool
) -> None:
    older = made(recovering(4), "old", "2026-01-01T00:00:01Z")
    younger = made(submitted(), "young", "2026-01-01T00:00:02Z")
    assert (older.state, pause_s(older)) == (JobState.RECOVERING, 4.0)
    jobs = [older, younger]
    assert claimed_slots(younger, jobs, lambda job: waited_s) == ({"n1": 2} if is_claimed else {})
    assert claimed_slots(older, jobs, lambda job: waited_s) == {}


@pytest.mark.parametrize("older", [recovering(0), running(), submitted()])
def test_older_job_that_does_not_pause_claims_nothing(older: Job) -> None:
    jobs = [made(older, "old", "2026-01-01T00:00:01Z"), made(submitted(), "young", "2026-01-01T00:00:02Z")]
    assert claimed_slots(jobs[1], jobs, lambda job: 0.0) == {}


def test_job_that_shall_stop_claims_nothing() -> None:
    older = after(recovering(4), Record(EventType.STOP_REQUESTED), "r2")
    jobs = [made(older, "old", "2026-01-01T00:00:01Z"), made(submitted(), "young", "2026-01-01T00:00:02Z")]
    assert claimed_slots(jobs[1], jobs, lambda job: 0.0) == {}


def test_pause_is_the_one_that_a_decision_keeps() -> None:
    job = recovering(4)
    assert decide(situation(job, age_s=pause_s(job) - 0.1)) == Decision(waits="waits 4 s before the next try")
    assert recorded(decided(job, age_s=pause_s(job))).type is EventType.STARTING


def test_claimed_slots_are_not_free_and_no_node_has_less_than_none() -> None:
    nodes = [Node(name, f"{name}-1", Inventory("h", "127.0.0.1", 2), True, 0.0) for name in ("n1", "n2", "n3")]
    found = capacities(submitted(), "cpu", nodes, (), {"n1": 1, "n2": 3})
    assert {each.node_id: each.num_free for each in found} == {"n1": 1, "n2": 0, "n3": 2}


def test_age_of_the_same_moment_is_by_name() -> None:
    assert age(made(submitted(), "a", "2026")) < age(made(submitted(), "b", "2026"))
