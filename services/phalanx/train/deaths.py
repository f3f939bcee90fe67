"""Deaths of ranks that are told before their gang is over. The peers of a dead rank are given seconds, in which they
may say what they saw or commit what is on its way; whoever watches learns of the death without waiting for them.

In most cases the gang is over at once, and the end of the attempt tells the death: then this tells nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.api.agent.v1 import record_pb2
from phalanx.lineage.events import Cause, EventType
from phalanx.train.book import Draft
from phalanx.train.decide import Record
from phalanx.train.launch.base import GangKey
from phalanx.train.states import Job

WAIT_S: Final = 0.4  # for the end of the gang, which tells more


@dataclass(frozen=True, slots=True)
class Death:
    """The first death of an attempt that is to be told at `due_s` (monotonic)."""

    key: GangKey
    cause: Cause
    due_s: float


class Deaths:
    """What records say of deaths, one an attempt. Safe for all threads. Lost with the process: then the end of the
    attempt alone tells it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._explained: dict[GangKey, set[int]] = {}
        self._waiting: dict[GangKey, Death] = {}

    def take(self, key: GangKey, node_id: str, records: Sequence[record_pb2.Record]) -> bool:
        """Takes what the ranks of a node said; whether there is a death that was not known."""
        is_new = False
        with self._lock:
            for record in records:
                if record.WhichOneof("event") == "error":
                    self._explained.setdefault(key, set()).add(record.rank)
                cause = _cause_of(record, node_id)
                is_explained = record.rank in self._explained.get(key, ())
                if cause is not None and not is_explained and key not in self._waiting:
                    self._waiting[key] = Death(key, cause, self._clock() + WAIT_S)
                    is_new = True
        return is_new

    def due(self) -> Iterator[Death]:
        """Those to be told now; each once."""
        now_s = self._clock()
        with self._lock:
            due = [death for death in self._waiting.values() if death.due_s <= now_s]
            for death in due:
                self._forget(death.key)
        yield from due

    def until_due_s(self, longest_s: float) -> float:
        """How long until the next is due, at most `longest_s`."""
        now_s = self._clock()
        with self._lock:
            return min([longest_s, *(max(0.0, death.due_s - now_s) for death in self._waiting.values())])

    def settle(self, key: GangKey) -> None:
        """The attempt is over, and its end is told."""
        with self._lock:
            self._forget(key)

    def _forget(self, key: GangKey) -> None:
        self._waiting.pop(key, None)
        self._explained.pop(key, None)


def draft_of(death: Death, job: Job) -> Draft | None:
    """The event that tells the death; None where the end of the attempt has told it. Telling it again is nothing."""
    request_id = f"death/{death.key.attempt}"
    if not job.is_live or job.attempt != death.key.attempt or request_id in job.requests:
        return None
    data = {"action": "notify", "first_step": 0, "last_step": 0}
    message = f"{death.cause.message}; its peers are being ended"
    return Draft(Record(EventType.INCIDENT, job.attempt, cause=death.cause, message=message, data=data), "", request_id)


def _cause_of(record: record_pb2.Record, node_id: str) -> Cause | None:
    """Why the rank's process ended, where nobody wanted it to."""
    if record.WhichOneof("event") != "ended":
        return None
    ended = record.ended
    if ended.sent_by_us or (ended.signal == 0 and ended.exit_code == 0):
        return None
    kind = "process_death"
    if ended.signal:
        known = ended.signal in set(signal.Signals)
        name = signal.Signals(ended.signal).name if known else f"signal {ended.signal}"
        return Cause(kind, f"killed by {name}", rank=record.rank, signal=ended.signal, node_id=node_id)
    message = f"exited with code {ended.exit_code} without a word"
    return Cause(kind, message, rank=record.rank, exit_code=ended.exit_code, node_id=node_id)
