"""Jobs by the cluster's registry in storage, as they were submitted and as they were last resumed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from phalanx.data.jobs import FoundJob, keep
from phalanx.lineage.events import EventLog, EventType
from phalanx.lineage.registry import JobName, Registry
from phalanx.objects import ObjectStore
from phalanx.spec import Job, parse_job

KEPT_JOBS = 4096
READERS = 16


@dataclass(frozen=True, slots=True)
class _Current:
    """A job file as it stands after event `number`."""

    number: int
    job: Job


class RegisteredJobs:
    """Finds jobs in the registry at the cluster's root; a registration never changes, so each is read once."""

    def __init__(self, root: ObjectStore) -> None:
        self._registry = Registry(root)
        self._kept: OrderedDict[JobName, FoundJob] = OrderedDict()
        self._current: OrderedDict[JobName, _Current] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, name: JobName) -> FoundJob | None:
        """See `JobSource.find`."""
        with self._lock:
            if name in self._kept:
                return self._kept[name]
        registered = self._registry.job(name.project, name.uid)
        if registered is None:
            return None
        found = FoundJob(name, registered.job, registered.store())
        with self._lock:
            keep(self._kept, name, found, KEPT_JOBS)
        return found

    def current(self, found: FoundJob) -> Job:
        """See `JobSource.current`. Reads the events that came since it was asked last, several at a time."""
        with self._lock:
            known = self._current.get(found.name, _Current(0, found.job))
        log = EventLog(found.store)
        newest = log.newest()
        with ThreadPoolExecutor(READERS, thread_name_prefix="events") as pool:
            events = list(pool.map(log.event, range(known.number + 1, newest + 1)))
        specs = [
            event.data["spec"]
            for event in events
            if event and event.type is EventType.RESUMED and event.data.get("spec")
        ]
        job = parse_job(specs[-1], where=str(found.name)) if specs else known.job
        with self._lock:
            keep(self._current, found.name, _Current(newest, job), KEPT_JOBS)
        return job
