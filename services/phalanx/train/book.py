"""All jobs as they stand, and the one way to change one: an event, created in storage before anybody is told.

`change` takes a decision on the newest snapshot; where another process has written first, its events are read and the
decision is taken anew, so that nobody acts twice. Killed between storage and database: `load` catches up.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage.events import EventLog, EventType, JobEvent
from phalanx.lineage.registry import JobName, RegisteredJob, Registry, key_of
from phalanx.objects import ObjectStore
from phalanx.rpc.errors import FailedPrecondition, NotFound, OutOfRange
from phalanx.train.decide import Record
from phalanx.train.states import Job, begin, fold, state_after
from phalanx.train.store import JobStore

LOG = logging.getLogger(__name__)
PAGE = 200
KEPT_EVENTS = 10_000


@dataclass(frozen=True, slots=True)
class Draft:
    """An event to be written. actor, request_id: who asked for it, and under which id."""

    record: Record
    actor: str = ""
    request_id: str = ""


@dataclass(slots=True)
class _Entry:
    """One job. lock: held while it changes."""

    store: ObjectStore
    job: Job
    lock: threading.RLock = field(default_factory=threading.RLock)


Listener = Callable[[Job, JobEvent], None]


def now() -> str:
    """The wall clock, for people."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Book:
    """The jobs of the cluster whose root is `root`. Every method may raise what stores raise. Safe for all threads.

    kept_events: how far behind a watcher may be. on_event: called for each new event, after it is in storage.
    """

    def __init__(
        self, root: ObjectStore, database: JobStore, on_event: Listener, *, kept_events: int = KEPT_EVENTS
    ) -> None:
        self._registry, self._database, self._on_event = Registry(root), database, on_event
        self._root_url = root.url.rstrip("/")
        self._kept_events = kept_events
        self._entries: dict[JobName, _Entry] = {}
        self._left_out: dict[JobName, str] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._num_changes = 0
        self._is_loaded = False

    # Reading.

    def load(self) -> None:
        """Brings database and snapshots to what storage holds. A job that can't be read is left out, with a line in the
        log: it must not hold up the others.
        """
        in_database = {job.name: job for job in self._database.jobs()}
        in_storage = set(self._registry.names())
        for name in in_database.keys() - in_storage:
            LOG.warning("%s is in the database and not in storage; forgotten", name)
            self._database.forget(name)
        for name in sorted(in_storage):
            try:
                self._load(name, in_database.get(name))
            except (OutsideError, PhalanxError) as error:
                LOG.error("%s", self._left_out.get(name, error))
        self._is_loaded = True

    def _registered(self, name: JobName) -> RegisteredJob:
        found = self._registry.job(name.project, name.uid)
        if found is None:
            raise NotFound(
                "job", value=str(name), expected="a job that was submitted", remedy="`phalanx job ls` lists them"
            )
        return found

    def _load(self, name: JobName, known: RegisteredJob | None = None) -> _Entry:
        """The job as storage has it now. known: its registration, where that was read. Raises NotFound,
        FailedPrecondition where its storage refuses us, OutsideError; then it is one of `left_out`.
        """
        try:
            entry = self._read(known or self._registered(name))
        except NotFound:
            with self._lock:
                self._left_out.pop(name, None)
            raise
        except (OutsideError, PhalanxError) as error:
            why, where = "; ".join(str(error).splitlines()), f"{self._root_url}/{key_of(name)}"
            told = FailedPrecondition(
                str(name),
                expected=f"a job that can be reached ({why})",
                remedy=f"mend that, or, if it never ran, free its name: remove {where}",
            )
            with self._lock:
                self._left_out[name] = str(told) if isinstance(error, PhalanxError) else f"{name} is left out: {why}"
            if isinstance(error, PhalanxError):
                raise told from error
            raise
        with self._lock:
            self._left_out.pop(name, None)
            return self._entries.setdefault(name, entry)

    def _read(self, registered: RegisteredJob) -> _Entry:
        store = registered.store()
        log, events = EventLog(store), self._database.events(registered.name)
        if events and log.event(events[-1].number) != events[-1]:
            LOG.warning("the database differs from storage for %s; it is read anew", registered.name)
            self._database.forget(registered.name)
            events = ()
        self._database.add_job(registered)
        job = begin(registered)
        for event in events:
            job = fold(job, event)
        entry = _Entry(store, job)
        try:
            self._catch_up(entry)
            if entry.job.revision == 0:  # killed between the registration and the first event
                first = Draft(Record(EventType.SUBMITTED), registered.owner, registered.request_id)
                if not self._written(entry, first):
                    self._catch_up(entry)
        except (OutsideError, PhalanxError):
            if entry.job.revision == 0:  # its name may be freed, and be another job's then
                with suppress(OutsideError):
                    self._database.forget(registered.name)
            raise
        return entry

    def jobs(self) -> tuple[Job, ...]:
        """All jobs, by name."""
        with self._lock:
            entries = tuple(self._entries.values())
        return tuple(sorted((entry.job for entry in entries), key=lambda job: job.name))

    def left_out(self) -> dict[JobName, str]:
        """The registered jobs that could not be read when they were last asked for, each with the line that says why
        and what helps.
        """
        with self._lock:
            found = dict(self._left_out)
        return {name: why for name, why in sorted(found.items()) if self._is_registered(name)}

    def _is_registered(self, name: JobName) -> bool:
        try:
            return self._registry.job(name.project, name.uid) is not None
        except OutsideError:
            return True

    def job(self, name: JobName) -> Job:
        """The job; raises NotFound."""
        return self._entry(name).job

    def store(self, name: JobName) -> ObjectStore:
        """The store rooted at the job; raises NotFound."""
        return self._entry(name).store

    def find(self, name: JobName) -> Job | None:
        """The job, or None."""
        try:
            return self._entry(name).job
        except NotFound:
            return None

    def by_request(self, request_id: str) -> Job | None:
        """The job that was submitted with that request id."""
        return next((job for job in self.jobs() if job.registered.request_id == request_id), None)

    def _entry(self, name: JobName) -> _Entry:
        with self._lock:
            entry = self._entries.get(name)
        return entry or self._load(name)

    # Changing.

    def register(self, registered: RegisteredJob) -> Job:
        """The job of that name: this one, or the one that was there."""
        found = self._registry.create_job(registered)
        with self._lock:
            entry = self._entries.get(found.name)
        return (entry or self._load(found.name, found)).job

    def change(self, name: JobName, decision: Callable[[Job], Draft | None]) -> Job:
        """The job after the event that `decision` asks for on the newest snapshot (None: nothing is to be done). It
        may be called several times; what it raises is passed on.
        """
        entry = self._entry(name)
        with entry.lock:
            while True:
                draft = decision(entry.job)
                if draft is None or self._written(entry, draft):
                    return entry.job
                self._catch_up(entry)

    def refresh(self, name: JobName) -> Job:
        """The job after whatever another process has written."""
        entry = self._entry(name)
        with entry.lock:
            self._catch_up(entry)
            return entry.job

    def _written(self, entry: _Entry, draft: Draft) -> bool:
        job, record = entry.job, draft.record
        state = state_after(job, record.type)
        assert state is not None, f"{record.type} of {job.name} while it is {job.state}"
        event = JobEvent(
            number=job.revision + 1,
            type=record.type,
            state=state,
            time=now(),
            writer=uuid.uuid4().hex,
            attempt=record.attempt,
            step=record.step,
            actor=draft.actor,
            request_id=draft.request_id,
            cause=record.cause,
            message=record.message,
            placement=record.placement,
            data=record.data,
        )
        folded = fold(job, event)  # what can't be read again is not written
        if not EventLog(entry.store).append(event):
            return False
        self._take(entry, folded, event)
        return True

    def _catch_up(self, entry: _Entry) -> None:
        for event in EventLog(entry.store).after(entry.job.revision):
            self._take(entry, fold(entry.job, event), event)

    def _take(self, entry: _Entry, folded: Job, event: JobEvent) -> None:
        self._database.add_event(folded.name, event)
        entry.job = folded
        if self._is_loaded:
            self._on_event(folded, event)
        self.touch()

    # Watching.

    def touch(self) -> None:
        """Wakes whoever waits for a change."""
        with self._changed:
            self._num_changes += 1
            self._changed.notify_all()

    def wait(self, known: int, timeout_s: float) -> int:
        """How many changes there were, once they are more than `known` or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_changes > known, timeout_s)
            return self._num_changes

    def oldest_kept(self, name: JobName) -> int:
        """The revision from which on a watcher may begin."""
        return max(0, self.job(name).revision - self._kept_events)

    def check_revision(self, name: JobName, after: int) -> None:
        """Raises OutOfRange for a revision that is too old, or newer than the job."""
        oldest, newest = self.oldest_kept(name), self.job(name).revision
        if not oldest <= after <= newest:
            why = f"from {oldest}, the oldest that is kept, to {newest}, the newest"
            raise OutOfRange("after_revision", value=after, expected=why, remedy="read the job anew, and watch from it")

    def events(self, name: JobName, after: int) -> Iterator[JobEvent]:
        """The events behind a revision, as they are now."""
        while page := self._database.events(name, after, PAGE):
            yield from page
            after = page[-1].number
