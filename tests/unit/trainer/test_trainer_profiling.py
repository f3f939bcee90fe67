"""Profiles on request: one after another, over the steps that were asked for, stored whole or not at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage.profiles import MOST_STEPS, MOST_WAITING, Found, Profiles, Taken
from phalanx.objects import ObjectExists, ObjectStore, open_store
from phalanx.trainer import profiling as profiling_module
from phalanx.trainer.profiling import Profiling

PATIENCE_S = 30.0


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path.as_uri()).within("job/")


@pytest.fixture
def profiles(store: ObjectStore) -> Profiles:
    return Profiles(store)


@pytest.fixture
def rank(profiles: Profiles) -> Iterator[Callable[..., Profiling]]:
    made: list[Profiling] = []

    def make(number: int = 0, attempt: int = 1) -> Profiling:
        made.append(Profiling(profiles, number, attempt, torch.device("cpu"), look_every_s=0.01))
        made[-1].open()
        return made[-1]

    yield make
    for each in made:
        each.close()


def waited(what: Callable[[], object]) -> object:
    """What `what` gives as soon as it gives anything."""
    until_s = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while time.monotonic() < until_s:
        if found := what():
            return found
        pause.wait(0.01)
    raise AssertionError("nothing came")


def train(rank: Profiling, steps: range, wanted_in: dict[int, int]) -> None:
    """Steps of a rank; a matrix product as large as the step's number is in each."""
    for step in steps:
        side = torch.ones(step, step)
        torch.mm(side, side)
        rank.turn(step, wanted_in.get(step, 0))


def traced(profiles: Profiles, found: Found, rank: int) -> list[dict[str, object]]:
    key = f"profiles/{found.request.number:08d}/r{rank:08d}-trace.json"
    events: list[dict[str, object]] = json.loads(profiles.read(key))["traceEvents"]
    return events


def test_request_is_taken_by_rank_0_and_measures_the_steps_that_were_asked_for(
    profiles: Profiles, rank: Callable[..., Profiling]
) -> None:
    profiles.ask(2, (), "first")
    first = rank()
    number = waited(first.wanted)
    assert number == 1 and first.wanted() == 0
    train(first, range(4, 9), {4: 1})
    first.close()
    (found,) = profiles.all()
    assert (found.taken, found.ranks_done) == (Taken(1), (0,))
    names = [event.get("name") for event in traced(profiles, found, 0)]
    assert "step 5" in names and "step 6" in names and "step 4" not in names and "step 7" not in names
    assert names.count("aten::mm") == 2


def test_memory_of_a_profile_names_what_each_operator_allocated(
    profiles: Profiles, rank: Callable[..., Profiling]
) -> None:
    profiles.ask(1, (), "first")
    one = rank(1)
    train(one, range(99, 101), {99: 1})
    one.close()
    memory = json.loads(profiles.read("profiles/00000001/r00000001-memory.json"))
    allocated = {each["name"]: each["self_cpu_memory_bytes"] for each in memory["operators"]}
    assert allocated["aten::mm"] == 100 * 100 * 4
    assert memory["peak_rss_bytes"] > 1 << 20


def test_rank_that_is_not_asked_measures_and_stores_nothing(profiles: Profiles, rank: Callable[..., Profiling]) -> None:
    profiles.ask(1, (0, 5), "first")
    one, five = rank(1), rank(5)
    for each in (one, five):
        train(each, range(1, 4), {1: 1})
        each.close()
    (found,) = profiles.all()
    assert found.ranks_done == (5,)


def test_requests_are_carried_out_one_after_another(profiles: Profiles, rank: Callable[..., Profiling]) -> None:
    for name in ("first", "second"):
        profiles.ask(1, (), name)
    first = rank()
    assert waited(first.wanted) == 1
    train(first, range(1, 2), {1: 1})
    assert [found.taken for found in profiles.all()] == [Taken(1), None]
    train(first, range(2, 3), {})
    assert waited(first.wanted) == 2
    train(first, range(3, 5), {3: 2})
    first.close()
    assert [found.ranks_done for found in profiles.all()] == [(0,), (0,)]


def test_request_that_an_attempt_died_with_is_not_begun_again(
    profiles: Profiles, rank: Callable[..., Profiling]
) -> None:
    profiles.ask(3, (), "first")
    assert waited(rank(attempt=1).wanted) == 1
    profiles.ask(1, (), "second")
    assert waited(rank(attempt=2).wanted) == 2
    first, second = profiles.all()
    assert (first.taken, first.stored, second.taken) == (Taken(1), {}, Taken(2))


def test_profile_that_the_end_of_training_cuts_short_keeps_what_it_has(
    profiles: Profiles, rank: Callable[..., Profiling]
) -> None:
    profiles.ask(50, (), "first")
    one = rank(1)
    train(one, range(1, 4), {1: 1})
    one.close()
    (found,) = profiles.all()
    assert [e["name"] for e in traced(profiles, found, 1) if str(e.get("name")).startswith("step ")].count("step 2")


def test_storage_that_fails_loses_the_profile_and_not_the_run(
    profiles: Profiles,
    rank: Callable[..., Profiling],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> str:
        raise OutsideError("storage is away")

    profiles.ask(1, (), "first")
    one = rank(1)
    monkeypatch.setattr(profiles, "put", refuse)
    train(one, range(1, 4), {1: 1})
    one.close()
    assert "profile 1 of rank 1 is lost: storage is away" in caplog.text
    assert profiles.all()[0].stored == {}


def test_no_profiler_runs_outside_the_steps_that_were_asked_for(
    profiles: Profiles, rank: Callable[..., Profiling], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    real = profiling_module.profile
    monkeypatch.setattr(profiling_module, "profile", lambda **options: made.append(options) or real(**options))
    one = rank(1)
    train(one, range(1, 10), {})
    assert made == [] and not torch.autograd.profiler._is_profiler_enabled
    profiles.ask(1, (), "first")
    train(one, range(10, 13), {10: 1})
    assert len(made) == 1 and not torch.autograd.profiler._is_profiler_enabled


def test_result_is_stored_once(profiles: Profiles) -> None:
    profiles.ask(1, (), "first")
    assert profiles.put(1, 3, "trace", b"{}") == "profiles/00000001/r00000003-trace.json"
    with pytest.raises(ObjectExists):
        profiles.put(1, 3, "trace", b"[]")
    assert profiles.all()[0].ranks_done == ()  # of its two files one is missing


def test_request_twice_is_one_and_another_under_its_id_is_refused(profiles: Profiles) -> None:
    assert profiles.ask(3, (5, 0, 5), "a") == profiles.ask(3, (0, 5), "a")
    with pytest.raises(
        PhalanxError, match=r"request id is 'a': expected profile 1 again \(3 steps of ranks \[0, 5\]\)"
    ):
        profiles.ask(4, (0, 5), "a")
    assert profiles.ask(3, (), "b").number == 2


@pytest.mark.parametrize(
    ("steps", "ranks", "where"), [(0, (), "--steps"), (MOST_STEPS + 1, (), "--steps"), (1, (-1,), "--ranks")]
)
def test_request_out_of_range_is_refused(profiles: Profiles, steps: int, ranks: tuple[int, ...], where: str) -> None:
    with pytest.raises(PhalanxError, match=where):
        profiles.ask(steps, ranks, "a")
    assert profiles.all() == ()


def test_more_requests_than_may_wait_are_refused_until_one_is_taken(profiles: Profiles) -> None:
    for number in range(MOST_WAITING):
        profiles.ask(1, (), str(number))
    with pytest.raises(PhalanxError, match=f"expected fewer than {MOST_WAITING}"):
        profiles.ask(1, (), "more")
    assert profiles.take(1, Taken(1)) and not profiles.take(1, Taken(2))
    assert profiles.ask(1, (), "more").number == MOST_WAITING + 1
