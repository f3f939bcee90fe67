"""What ranks said, in memory: one log for all jobs, bounded, numbered, for whoever watches. A measurement that is lost
is lost; decisions are events.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from phalanx.api.agent.v1 import record_pb2
from phalanx.core.step_parts import StepParts
from phalanx.lineage.events import JobEvent
from phalanx.train.wire import parts_of

KEPT_RECORDS: Final = 100_000
SIGN_OF_LIFE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Told:
    """One entry. number: in the log, from 1. what: None is a sign of life, with the number of the last entry."""

    number: int
    job: str
    what: record_pb2.Record | JobEvent | None


class RecordLog:
    """The newest `kept` entries; log_id is fresh for each process. Safe for all threads."""

    def __init__(self, kept: int = KEPT_RECORDS) -> None:
        self.log_id = uuid.uuid4().hex
        self._told: deque[Told] = deque(maxlen=kept)
        self._last = 0
        self._changed = threading.Condition()

    def add(self, job: str, what: record_pb2.Record | JobEvent) -> None:
        """Appends an entry."""
        with self._changed:
            self._last += 1
            self._told.append(Told(self._last, job, what))
            self._changed.notify_all()

    def watch(self, log_id: str, after: int, is_over: Callable[[], bool]) -> Iterator[Told]:
        """The kept entries behind `after` (from the beginning where the number belongs to another log), then what
        comes, with signs of life in between, until `is_over`.
        """
        after = after if log_id == self.log_id else 0
        while not is_over():
            with self._changed:
                if self._last <= after:
                    self._changed.wait(SIGN_OF_LIFE_S)
                first = self._last - len(self._told) + 1
                start = max(after + 1, first) - first
                page = [self._told[index] for index in range(start, min(start + 500, len(self._told)))]
            yield from page
            after = page[-1].number if page else after
            if not page:
                yield Told(after, "", None)

    def wake(self) -> None:
        """Has those who wait look again whether they are over."""
        with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Progress:
    """The last finished step of an attempt that is known. loss: None where it is not finite. epochs: passes over each
    source of a mixture, by name. replica_bytes_per_token: None where replicas sum their gradients at every step. parts:
    of the step's wall time on rank 0, None where unknown.
    """

    attempt: int
    step: int
    loss: float | None
    at_s: float
    epochs: Mapping[str, float] = field(default_factory=dict)
    replica_bytes_per_token: float | None = None
    parts: StepParts | None = None


class LastSteps:
    """The last finished step of each job. Safe for all threads."""

    def __init__(self) -> None:
        self._by_job: dict[str, Progress] = {}
        self._lock = threading.Lock()

    def take(self, job: str, record: record_pb2.Record) -> None:
        """Takes a record of a finished step; older attempts are ignored."""
        if record.WhichOneof("event") != "progress":
            return
        told = record.progress
        loss = told.loss if told.HasField("loss") else None
        with self._lock:
            known = self._by_job.get(job)
            if known is None or record.attempt >= known.attempt:
                sent = told.replica_bytes_per_token if told.HasField("replica_bytes_per_token") else None
                parts = parts_of(told.parts) if told.HasField("parts") else None
                self._by_job[job] = Progress(
                    record.attempt, told.step, loss, time.monotonic(), dict(told.epochs), sent, parts
                )

    def of(self, job: str) -> Progress | None:
        """The last step of a job, or None where none was told."""
        with self._lock:
            return self._by_job.get(job)
