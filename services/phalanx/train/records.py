"""What ranks said, in memory: one log for all jobs, bounded, numbered, for whoever watches. A measurement that is lost
is lost; decisions are events.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.api.agent.v1 import record_pb2
from phalanx.core.expert_load import ExpertLoad
from phalanx.core.step_parts import StepParts
from phalanx.lineage.events import JobEvent
from phalanx.train.values import EvaluationView
from phalanx.train.wire import evaluation_of, load_of, parts_of

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
    of the step's wall time on rank 0, None where unknown. experts: None for a model without any. evaluation: the
    attempt's last one.
    """

    attempt: int
    step: int
    loss: float | None
    at_s: float
    epochs: Mapping[str, float] = field(default_factory=dict)
    replica_bytes_per_token: float | None = None
    parts: StepParts | None = None
    experts: ExpertLoad | None = None
    evaluation: EvaluationView | None = None


def _progress(attempt: int, told: record_pb2.Progress, evaluation: EvaluationView | None) -> Progress:
    return Progress(
        attempt,
        told.step,
        told.loss if told.HasField("loss") else None,
        time.monotonic(),
        dict(told.epochs),
        told.replica_bytes_per_token if told.HasField("replica_bytes_per_token") else None,
        parts_of(told.parts) if told.HasField("parts") else None,
        load_of(told.experts) if told.HasField("experts") else None,
        evaluation,
    )


class LastSteps:
    """The last finished step of each job. Safe for all threads."""

    def __init__(self) -> None:
        self._by_job: dict[str, Progress] = {}
        self._lock = threading.Lock()

    def take(self, job: str, record: record_pb2.Record) -> None:
        """Takes a record of a finished step, of one whose gradients overflowed, or of an evaluation; older attempts are
        ignored.
        """
        with self._lock:
            known = self._by_job.get(job)
            if known is not None and record.attempt < known.attempt:
                return
            is_same = known is not None and record.attempt == known.attempt
            match record.WhichOneof("event"):
                case "progress":
                    evaluation = known.evaluation if known is not None and is_same else None
                    self._by_job[job] = _progress(record.attempt, record.progress, evaluation)
                case "evaluation" if known is not None and is_same:
                    self._by_job[job] = replace(known, evaluation=evaluation_of(record.evaluation))
                case "overflow" if known is not None and is_same:
                    told = record.overflow
                    self._by_job[job] = replace(known, step=told.step, loss=told.loss, at_s=time.monotonic())
                case _:
                    pass

    def of(self, job: str) -> Progress | None:
        """The last step of a job, or None where none was told."""
        with self._lock:
            return self._by_job.get(job)
