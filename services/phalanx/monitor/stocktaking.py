"""Asks the checkpoint service which checkpoints a run has: which are damaged or pinned, and how large the newest is.

A run that somebody looks at is asked for every `WATCHED_S`, as pins come without an event; another one behind a commit,
at most every `UNWATCHED_S`. Without that service, or while it is away, the page shows what train and storage tell.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.checkpoint.client import Listing, State, View
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.monitor.attempts import Saved
from phalanx.monitor.board import Board
from phalanx.monitor.run import Run

LOG = logging.getLogger(__name__)
TICK_S, WATCHED_S, UNWATCHED_S, AFTER_FAILURE_S = 0.5, 3.0, 30.0, 10.0
CHANGING = frozenset(
    {
        train_pb.JOB_EVENT_TYPE_COMMITTED,
        train_pb.JOB_EVENT_TYPE_RUNNING,
        train_pb.JOB_EVENT_TYPE_INCIDENT,
    }
)


class Lists(Protocol):
    """What is used of the checkpoint service."""

    def list(self, job: str, *, include_dead: bool) -> Listing: ...


class Stocktaking:
    """A thread that asks. client: closed by whoever made it."""

    def __init__(self, board: Board, client: Lists) -> None:
        self._board, self._client = board, client
        self._lock = threading.Lock()
        self._wanted: set[str] = set()
        self._asked_s: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stocktaking", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def close(self) -> None:
        """Ends."""
        self._stop.set()
        self._thread.join(5.0)

    def on_told(self, told: train_pb.WatchRecordsResponse) -> None:
        """Takes note of a job whose checkpoints may have changed."""
        if told.HasField("event") and told.event.type in CHANGING:
            with self._lock:
                self._wanted.add(told.job)

    def due(self, now_s: float) -> list[str]:
        """The jobs to be asked for, at `now_s` by the monotonic clock."""
        watched = self._board.watched(now_s - 2 * WATCHED_S)
        with self._lock:
            periods_s = dict.fromkeys(self._wanted, UNWATCHED_S) | dict.fromkeys(watched, WATCHED_S)
        never_s = -float("inf")
        return [job for job, period_s in periods_s.items() if now_s - self._asked_s.get(job, never_s) >= period_s]

    def ask(self, job: str) -> None:
        """Brings a run up to what the service says now. Raises PhalanxError, OutsideError."""
        with self._lock:
            self._wanted.discard(job)
        before = self._board.change(job, _told)
        found = [_saved(view) for view in self._client.list(job, include_dead=True).checkpoints if _exists(view)]

        def take(run: Run) -> bool:
            """A commit that was told meanwhile may be missing in the answer."""
            if _told(run) != before:
                return False
            run.set_checkpoints(found)
            return True

        if not self._board.change(job, take):
            with self._lock:
                self._wanted.add(job)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            for job in self.due(time.monotonic()):
                if self._stop.is_set():
                    return
                self._asked_s[job] = time.monotonic()
                try:
                    self.ask(job)
                except (OutsideError, PhalanxError) as error:
                    LOG.info("the checkpoints of %s are not known: %s", job, error)
                    self._asked_s[job] += AFTER_FAILURE_S
                except Exception:
                    LOG.exception("asking for the checkpoints of %s failed", job)


def _told(run: Run) -> dict[int, tuple[int, ...]]:
    return {number: facts.checkpoints for number, facts in run.attempts.items()}


def _exists(view: View) -> bool:
    return view.state != State.OPEN


def _saved(view: View) -> Saved:
    created_ns = 0 if view.created is None else int(view.created.timestamp() * 1e9)
    is_damaged, is_pinned = view.state == State.DAMAGED, view.pin_reason is not None
    return Saved(view.ref.attempt, view.ref.step, is_damaged, is_pinned, view.num_bytes, created_ns)
