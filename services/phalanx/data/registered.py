"""Jobs by the cluster's registry in storage."""

from __future__ import annotations

import threading
from collections import OrderedDict

from phalanx.data.jobs import FoundJob, keep
from phalanx.lineage.registry import JobName, Registry
from phalanx.objects import ObjectStore

KEPT_JOBS = 4096


class RegisteredJobs:
    """Finds jobs in the registry at the cluster's root; a registration never changes, so each is read once."""

    def __init__(self, root: ObjectStore) -> None:
        self._registry = Registry(root)
        self._kept: OrderedDict[JobName, FoundJob] = OrderedDict()
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
