"""The jobs that this service looks after: those in the cluster's registry, and no others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.checkpoint.facts import Policy
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.lineage.events import EventLog, EventType
from phalanx.lineage.registry import JobName, RegisteredJob, Registry
from phalanx.objects import ObjectStore
from phalanx.snapshot.fork import imported
from phalanx.spec import Job, parse_job


@dataclass(frozen=True, slots=True)
class HostedJob:
    """A registered job. store: rooted at the job. submitted: what its job file asked for when it was submitted.
    origin: the checkpoint of another job that it was forked from.
    """

    name: JobName
    store: ObjectStore
    submitted: Policy
    origin: tuple[JobName, CheckpointRef] | None

    @property
    def lineage(self) -> Lineage:
        """The job's lineage."""
        return Lineage(self.store)

    def has_copied_its_origin(self) -> bool:
        """Whether a fork has its origin's checkpoint as its own, or had once."""
        record = self.lineage.read_job()
        return record is not None and record.origin is not None and imported(self.lineage, record.origin)


class Jobs:
    """Reads the registry in the cluster's root. What is registered never changes, so each job is opened once."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._opened: dict[JobName, HostedJob] = {}
        self._policies: dict[JobName, tuple[int, Policy]] = {}
        self._copied: set[JobName] = set()

    def find(self, name: JobName) -> HostedJob:
        """The job of that name; raises NotFound."""
        with self._lock:
            opened = self._opened.get(name)
        if opened is not None:
            return opened
        registered = self._registry.job(name.project, name.uid)
        if registered is None:
            from phalanx.rpc import NotFound  # not needed where commands collect without services

            raise NotFound("job", value=str(name), expected="a job that was submitted", remedy="list the jobs")
        return self._open(registered)

    def all(self) -> Iterator[HostedJob]:
        """Every registered job."""
        for name in self._registry.names():
            yield self.find(name)

    def policy(self, job: HostedJob) -> Policy:
        """What the job asks for now: a resume may have changed it since it was submitted."""
        with self._lock:
            number, policy = self._policies.get(job.name, (0, job.submitted))
        for event in EventLog(job.store).after(number):
            number = event.number
            if event.type is EventType.RESUMED and event.data.get("spec"):
                policy = policy_of(parse_job(event.data["spec"], where=str(job.name)))
        with self._lock:
            self._policies[job.name] = number, policy
        return policy

    def origins(self, name: JobName) -> dict[CheckpointRef, str]:
        """The checkpoints of a job that forks of it have not copied yet, with the name of one of these."""
        needed: dict[CheckpointRef, str] = {}
        for job in self.all():
            if job.origin is None or job.origin[0] != name or job.name in self._copied:
                continue
            if job.has_copied_its_origin():
                self._copied.add(job.name)
            else:
                needed[job.origin[1]] = str(job.name)
        return needed

    def fork_names(self, name: JobName) -> frozenset[JobName]:
        """The jobs that were forked from this one."""
        return frozenset(job.name for job in self.all() if job.origin is not None and job.origin[0] == name)

    def _open(self, registered: RegisteredJob) -> HostedJob:
        origin = registered.origin
        source = None if origin is None else (origin.name, origin.checkpoint)
        job = HostedJob(registered.name, registered.store(), policy_of(registered.job), source)
        with self._lock:
            return self._opened.setdefault(job.name, job)


def policy_of(job: Job) -> Policy:
    """What a job file asks for."""
    asked = job.checkpoint
    return Policy(
        keep_latest=asked.keep_latest_k,
        keep_every=asked.keep_every_n,
        keep_best=asked.keep_best_m,
        best_by=asked.keep_best_by,
        best_order=asked.keep_best_order,
        keep_speculative=asked.speculative_keep_k,
        healthy_steps=asked.speculative_healthy_steps,
    )
