"""Deaths of ranks that are told before their gang is over: once, and only where nobody wanted them."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from train_values import running

from phalanx.api.agent.v1 import record_pb2 as pb
from phalanx.lineage.events import EventType
from phalanx.train.deaths import WAIT_S, Death, Deaths, draft_of
from phalanx.train.launch.base import GangKey

KEY = GangKey("projects/p/jobs/j", 1)


class Clock:
    """Monotonic seconds, moved by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def record(rank: int = 1, **event: Any) -> pb.Record:
    return pb.Record(rank=rank, attempt=1, **event)


def killed(rank: int = 1, *, sent_by_us: bool = False) -> pb.Record:
    return record(rank, ended=pb.Ended(signal=signal.SIGKILL, sent_by_us=sent_by_us))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def told(deaths: Deaths) -> list[str]:
    return [str(death.cause) for death in deaths.due()]


def test_death_is_due_after_its_wait_and_once(clock: Clock) -> None:
    deaths = Deaths(clock)
    assert deaths.take(KEY, "n1", [record(0, opened=pb.Opened(step=0)), killed()])
    assert not deaths.take(KEY, "n1", [killed(0)]), "a second death of an attempt is none to tell"
    assert deaths.until_due_s(60.0) == pytest.approx(WAIT_S)
    assert told(deaths) == []
    clock.now_s += WAIT_S
    assert deaths.until_due_s(60.0) == 0.0
    assert told(deaths) == ["process_death of rank 1 on n1: killed by SIGKILL"]
    assert told(deaths) == [] and deaths.until_due_s(60.0) == 60.0


def test_death_of_a_gang_whose_end_is_told_is_not_due(clock: Clock) -> None:
    deaths = Deaths(clock)
    deaths.take(KEY, "n1", [killed()])
    deaths.settle(KEY)
    clock.now_s += 60
    assert told(deaths) == []


@pytest.mark.parametrize(
    "records",
    [
        [killed(sent_by_us=True)],
        [record(ended=pb.Ended(exit_code=0))],
        [record(error=pb.Cause(message="raised")), record(ended=pb.Ended(exit_code=1))],
        [record(progress=pb.Progress(step=1))],
    ],
    ids=["killed by its gang", "returned", "said why", "lives"],
)
def test_end_that_was_wanted_or_explained_is_no_death(clock: Clock, records: list[pb.Record]) -> None:
    deaths = Deaths(clock)
    assert not deaths.take(KEY, "n1", records)
    clock.now_s += 60
    assert told(deaths) == []


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (pb.Ended(exit_code=3), "exited with code 3 without a word"),
        (pb.Ended(signal=11), "killed by SIGSEGV"),
        (pb.Ended(signal=63), "killed by signal 63"),
    ],
)
def test_death_says_how(clock: Clock, ended: pb.Ended, words: str) -> None:
    deaths = Deaths(clock)
    deaths.take(KEY, "n1", [record(ended=ended)])
    clock.now_s += 1
    (death,) = deaths.due()
    assert death.cause.message == words and death.cause.kind == "process_death"


def test_event_of_a_death_changes_nothing_but_tells_it_once_while_the_attempt_lives(clock: Clock) -> None:
    deaths = Deaths(clock)
    job = running()
    key = GangKey(str(job.name), job.attempt)
    deaths.take(key, "n1", [killed()])
    clock.now_s += 1
    (death,) = deaths.due()
    draft = draft_of(death, job)
    assert draft is not None and draft.record.type is EventType.INCIDENT
    assert draft.record.message == "killed by SIGKILL; its peers are being ended"
    assert draft_of(death, replace(job, requests={draft.request_id: EventType.INCIDENT})) is None
    assert draft_of(death, replace(job, is_live=False)) is None
    assert draft_of(Death(replace(key, attempt=key.attempt + 1), death.cause, 0.0), job) is None
