"""A watcher that is cut off a hundred times, its service killed twice: it sees every event once, in order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from support.jobs import job_folder, write_job
from support.services import Services, resized, services

from phalanx import Client
from phalanx.api.train.v1 import train_service_pb2 as pb
from phalanx.lineage.events import EventLog
from phalanx.rpc import OutOfRange, Unavailable
from phalanx.spec import load_job
from phalanx.train.wire import event_of
from phalanx.trainer.places import job_store

SEED = 20261128
NUM_CONNECTIONS, KILL_AT = 100, (30, 70)
ANSWER_S = 60.0
KEPT_EVENTS = 12
NAME = "projects/default/jobs/watched"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with services(Path(tmp_path_factory.mktemp("up")) / "home", "--no-agent") as running:
        yield running


class Restless:
    """Stops and resumes a job that has no nodes, over and over: three events a turn. Leaving it raises what it met."""

    def __init__(self, running: Services) -> None:
        self._running, self._is_over = running, threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Restless:
        self._going = self._thread.submit(self._go)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.shutdown()
        self._going.result()

    def check(self) -> None:
        """Raises what it met where it has ended by itself: nothing would happen any more."""
        if self._going.done():
            self._going.result()

    def _go(self) -> None:
        with self._running.client() as client:
            for turn in count(1):
                # Each call alone until it is answered: a stop said once more behind its resume would do nothing.
                answered(partial(client.stop, NAME, request_id=f"stop-{turn}"))
                answered(partial(client.wait, NAME, ANSWER_S))
                answered(partial(client.resume, NAME, request_id=f"resume-{turn}"))
                if self._is_over.wait(0.05):
                    return


def answered(call: Callable[[], object]) -> None:
    """Makes a call again while train is being started again."""
    end_s = time.monotonic() + ANSWER_S
    while True:
        try:
            call()
            return
        except Unavailable:
            if time.monotonic() > end_s:
                raise


def connect_once(client: Client, after: int, at_most: int, seen: list[int]) -> None:
    """One connection, cut off after a few events."""
    request = pb.WatchJobRequest(name=NAME, after_revision=after)
    with client.train._stub.WatchJob(request, timeout=30) as stream:  # type: ignore[attr-defined]
        for message in stream:
            if message.WhichOneof("message") == "event":
                seen.append(event_of(message.event).revision)
                at_most -= 1
            else:
                assert message.bookmark.revision == (seen[-1] if seen else 0)
            if at_most <= 0:
                return


@pytest.mark.timeout(300)
def test_client_that_reconnects_a_hundred_times_misses_no_event_and_sees_none_twice(
    shared: Services, corpus: str, tmp_path: Path
) -> None:
    path = resized(write_job(tmp_path, corpus), name="watched")
    draw = random.Random(SEED)
    seen: list[int] = []
    followed: list[int] = []
    with shared.client() as client, shared.client() as other:
        client.submit(path)

        def follow() -> None:
            with suppress(ValueError):  # until the channel is closed
                followed.extend(event.revision for event in other.watch(NAME))

        threading.Thread(target=follow, daemon=True).start()
        with Restless(shared) as restless:
            connections = 0
            while connections < NUM_CONNECTIONS:
                restless.check()
                if connections in KILL_AT and shared.state.process("train").restarts <= KILL_AT.index(connections):
                    shared.kill("train")
                try:
                    connect_once(client, seen[-1] if seen else 0, draw.randint(1, 4), seen)
                    connections += 1
                except Unavailable:
                    time.sleep(0.05)  # train is being started again
        newest = client.job(NAME).revision
        assert seen == list(range(1, seen[-1] + 1)) and newest >= seen[-1] >= NUM_CONNECTIONS
        end_s = time.monotonic() + 20
        while len(followed) < newest and time.monotonic() < end_s:
            time.sleep(0.02)
        assert followed == list(range(1, newest + 1)), "the client that follows by itself"
    assert shared.state.process("train").restarts == len(KILL_AT)
    assert [event.number for event in EventLog(job_store(load_job(path))).after(0)] == list(range(1, newest + 1))


@pytest.mark.timeout(300)
def test_revision_that_is_too_old_or_unknown_is_told_with_the_oldest_kept(
    shared: Services, corpus: str, tmp_path: Path
) -> None:
    shared.configure("train", kept_events=KEPT_EVENTS)
    path = resized(write_job(tmp_path, corpus), name="old")
    with shared.client() as client:
        client.submit(path)
        while client.job("old").revision <= KEPT_EVENTS + 3:
            client.stop("old")
            client.wait("old", 20)
            client.resume("old")
        newest = client.job("old").revision
        oldest = newest - KEPT_EVENTS
        with pytest.raises(OutOfRange) as too_old:
            next(client.watch("old", 1))
        assert "1" in str(too_old.value) and str(oldest) in str(too_old.value), (too_old.value, newest)
        with pytest.raises(OutOfRange, match=str(newest)):
            next(client.watch("old", newest + 10))
        first = next(client.watch("old", oldest))
        assert first.revision == oldest + 1
        told = shared.cli("job", "watch", "old", "--after", "1", "--json", code=2)
        assert len(told.err.splitlines()) == 1 and str(oldest) in told.err
    assert len(list((job_folder(path) / "events").iterdir())) == newest
