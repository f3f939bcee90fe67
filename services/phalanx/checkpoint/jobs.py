"""The jobs that this service looks after: those in the cluster's registry, and no others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.checkpoint.retention import Policy
from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.lineage.registry import JobName, RegisteredJob, Registry
from phalanx.objects import ObjectStore
from phalanx.rpc import NotFound


@dataclass(frozen=True, slots=True)
class HostedJob:
    """A registered job. store: rooted at the job. origin: the checkpoint of another job that it was forked from."""

    name: JobName
    store: ObjectStore
    policy: Policy
    origin: tuple[JobName, CheckpointRef] | None

    @property
    def lineage(self) -> Lineage:
        """The job's lineage."""
        return Lineage(self.store)

    def has_checkpoints(self) -> bool:
        """Whether the job has any checkpoint of its own, live or not."""
        attempts = (key for key in self.store.children("a") if key.endswith("/") and key != keys.ATTEMPTS)
        return any(keys.manifest_ref(info.key) for folder in attempts for info in self.store.list(f"{folder}s"))


class Jobs:
    """Reads the registry in the cluster's root. What is registered never changes, so each job is opened once."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._opened: dict[JobName, HostedJob] = {}
        self._copied: set[JobName] = set()

    def find(self, name: JobName) -> HostedJob:
        """The job of that name; raises NotFound."""
        with self._lock:
            opened = self._opened.get(name)
        if opened is not None:
            return opened
        registered = self._registry.job(name.project, name.uid)
        if registered is None:
            raise NotFound("job", value=str(name), expected="a job that was submitted", remedy="list the jobs")
        return self._open(registered)

    def all(self) -> Iterator[HostedJob]:
        """Every registered job."""
        for name in self._registry.names():
            yield self.find(name)

    def forks_of(self, name: JobName) -> tuple[dict[CheckpointRef, str], frozenset[JobName]]:
        """The checkpoints of a job that forks of it have not copied yet, with the name of one of these; and the forks
        there are. A fork that has a checkpoint of its own needs its origin no more.
        """
        forks = [(job, job.origin[1]) for job in self.all() if job.origin is not None and job.origin[0] == name]
        needed: dict[CheckpointRef, str] = {}
        for job, ref in forks:
            if job.name not in self._copied and job.has_checkpoints():
                self._copied.add(job.name)
            if job.name not in self._copied:
                needed[ref] = str(job.name)
        return needed, frozenset(job.name for job, _ in forks)

    def fork_names(self, name: JobName) -> frozenset[JobName]:
        """The jobs that were forked from this one."""
        return frozenset(job.name for job in self.all() if job.origin is not None and job.origin[0] == name)

    def _open(self, registered: RegisteredJob) -> HostedJob:
        checkpoint, origin = registered.job.checkpoint, registered.origin
        policy = Policy(checkpoint.keep_latest_k, checkpoint.keep_every_n)
        source = None if origin is None else (origin.name, origin.checkpoint)
        job = HostedJob(registered.name, registered.store(), policy, source)
        with self._lock:
            return self._opened.setdefault(job.name, job)
