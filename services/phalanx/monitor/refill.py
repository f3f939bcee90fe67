"""Fills from storage what the monitor did not hear: the job file, attempts, events, and the steps that are missing.

Storage is the truth and the monitor a reader of it: done at the start for every registered job, and again for a job of
which records were missed or whose attempts changed. Bounded: `MAX_OBJECTS` records objects a job, newest first, and of
these only such whose steps are not all there. Storage that does not answer is asked again later; nothing waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np

from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import DamagedObject, Lineage, StepRows, keys
from phalanx.lineage.events import EventLog
from phalanx.lineage.registry import JobName, RegisteredJob, Registry
from phalanx.monitor.attempts import AttemptFacts, layout_words
from phalanx.monitor.board import Board
from phalanx.monitor.curve import LATER, Rows, rows_from
from phalanx.monitor.reporter import Worker
from phalanx.monitor.rules import Policy
from phalanx.objects import ObjectStore
from phalanx.train.client import event_message

LOG = logging.getLogger(__name__)
MAX_OBJECTS = 2000
OVER = frozenset(
    {
        train_pb.JOB_EVENT_TYPE_SUCCEEDED,
        train_pb.JOB_EVENT_TYPE_FAILED,
        train_pb.JOB_EVENT_TYPE_STOPPED,
        train_pb.JOB_EVENT_TYPE_SUSPENDED,
    }
)
CHANGING = OVER | frozenset(
    {
        train_pb.JOB_EVENT_TYPE_SUBMITTED,
        train_pb.JOB_EVENT_TYPE_STARTING,
        train_pb.JOB_EVENT_TYPE_RUNNING,
        train_pb.JOB_EVENT_TYPE_RESUMED,
        train_pb.JOB_EVENT_TYPE_COMMITTED,
    }
)


class Refill:
    """A thread that reads storage. registry: None where the cluster has no storage; then it does nothing."""

    def __init__(self, board: Board, registry: Registry | None) -> None:
        self._board, self._registry = board, registry
        self._lock = threading.Lock()
        self._all_wanted = True
        self._wanted: dict[str, bool] = {}
        self._missing: set[str] = set()
        self.first_done = threading.Event()
        self._worker = Worker("refill", self._work)

    def start(self) -> None:
        """Begins with all registered jobs; `first_done` is set when that is through."""
        if self._registry is None:
            self.first_done.set()
        self._worker.start()

    def close(self) -> None:
        """Ends."""
        self._worker.close()

    def ask(self, jobs: frozenset[str], *, steps: bool = True) -> None:
        """These jobs are read again; with the steps that are missing, or without."""
        with self._lock:
            for job in jobs:
                self._wanted[job] = steps or self._wanted.get(job, False)
        self._worker.wake()

    def on_missed(self, jobs: frozenset[str]) -> None:
        """Records of these jobs were missed: what is in storage is read now, the rest once their next checkpoint is
        there, and what is still missing when they are over.
        """
        with self._lock:
            self._missing |= jobs
        self.ask(jobs)

    def on_told(self, told: train_pb.WatchRecordsResponse) -> None:
        """Asks for a job whose attempts changed."""
        if told.HasField("event") and told.event.type in CHANGING:
            with self._lock:
                is_covered = told.event.type == train_pb.JOB_EVENT_TYPE_COMMITTED and told.job in self._missing
                self._missing -= {told.job} if is_covered else set()
            self.ask(frozenset({told.job}), steps=is_covered or told.event.type in OVER)

    def _work(self) -> bool:
        if self._registry is None:
            return True
        if self._all_wanted:
            names = frozenset(str(name) for name in self._registry.names())
            self.ask(names)
            self._all_wanted = False
        is_done = True
        while (taken := self._take()) is not None:
            is_done &= self._try(*taken, self._registry)
        self.first_done.set()
        return is_done

    def _take(self) -> tuple[str, bool] | None:
        with self._lock:
            if not self._wanted or self._worker.stop.is_set():
                return None
            job = next(iter(self._wanted))
            return job, self._wanted.pop(job)

    def _try(self, name: str, steps: bool, registry: Registry) -> bool:
        """False where it is to be tried again."""
        try:
            job = JobName.parse(name)
            found = registry.job(job.project, job.uid)
            if found is not None:
                fill_job(self._board, found, steps=steps, stopped=self._worker.stop.is_set)
        except (DamagedObject, PhalanxError) as error:
            LOG.error("%s is not filled from storage: %s", name, error)
        except OutsideError as error:
            LOG.warning("%s is not filled from storage: %s", name, error)
            with self._lock:
                self._wanted.setdefault(name, steps)
            return False
        return True


def fill_job(
    board: Board, registered: RegisteredJob, *, steps: bool, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Brings a run up to what storage says. Raises PhalanxError for a job file that does not hold, DamagedObject, and
    what the store raises.
    """
    name, job, store = str(registered.name), registered.job, registered.store()
    policy = Policy.of(job.recovery)
    board.change(name, lambda run: run.set_spec(job.training.steps, policy))
    last_event = board.change(name, lambda run: max(run.events, default=0))
    board.add_past(name, [event_message(event) for event in EventLog(store).after(last_event)])
    lineage = Lineage(store)
    facts = attempt_facts(lineage, store)
    board.change(name, lambda run: run.set_facts(facts))
    if steps:
        fill_steps(board, name, lineage, stopped)


def fill_steps(board: Board, job: str, lineage: Lineage, stopped: Callable[[], bool] = lambda: False) -> None:
    """Adds the live chain's steps that are missing."""
    for ref in list(lineage.records.live_refs())[-MAX_OBJECTS:][::-1]:
        named = keys.records_name(ref.key)
        if stopped():
            return
        if named is None or board.has_steps(job, named.first_step, named.last_step):
            continue
        _, rows = lineage.records.read(ref)
        if len(rows):
            board.fill(job, step_rows(rows, named.attempt))


def step_rows(steps: StepRows, attempt: int) -> Rows:
    """Step records as rows of a curve; the learning rate is not in them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.where(steps.step_time_s > 0, steps.valid_tokens / steps.step_time_s, np.nan)
    columns = {
        "step": steps.step,
        "loss": steps.loss,
        "tokens_per_second": speed,
        "gradient_norm": steps.gradient_norm,
        "step_time_s": steps.step_time_s,
        "data_wait_s": steps.data_wait_s,
        "attempt": np.full(len(steps), attempt),
        **{name: getattr(steps, name) for name in LATER},
    }
    rows = rows_from(columns, len(steps))
    return rows[np.argsort(rows["step"], kind="stable")]


def attempt_facts(lineage: Lineage, store: ObjectStore) -> tuple[AttemptFacts, ...]:
    """All attempts, with their checkpoints that exist, live or not."""
    return tuple(
        AttemptFacts(
            attempt.number,
            attempt.parent.attempt if attempt.parent else 0,
            attempt.start_step,
            0,
            _committed_steps(store, attempt.number),
            layout_words(attempt.placement),
        )
        for attempt in lineage.attempts()
    )


def _committed_steps(store: ObjectStore, attempt: int) -> tuple[int, ...]:
    refs = (keys.manifest_ref(info.key) for info in store.list(keys.checkpoints_of(attempt)))
    return tuple(sorted(ref.step for ref in refs if ref is not None))
