"""The jobs of a cluster as create-only objects below its root, so that every service finds them without asking another.

`registry/jobs/<project>/<uid>.json` is the decision that the job exists, under which request, and whose it is. It never
changes; what becomes of the job stands in its event log (`events`). A job's uid is its `[job] name`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import Field

from phalanx.core.errors import PhalanxError
from phalanx.lineage.documents import decode_document, encode_document
from phalanx.lineage.errors import DamagedObject
from phalanx.lineage.values import CheckpointRef
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore, StorageSettings, open_store
from phalanx.spec import Job, parse_job

PREFIX: Final = "registry/jobs/"
_NAME: Final = r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
_KEY: Final = re.compile(rf"{PREFIX}({_NAME})/({_NAME})\.json")
_JOB: Final = re.compile(rf"projects/({_NAME})/jobs/({_NAME})")


@dataclass(frozen=True, slots=True, order=True)
class JobName:
    """`projects/<project>/jobs/<uid>`."""

    project: str
    uid: str

    def __str__(self) -> str:
        return f"projects/{self.project}/jobs/{self.uid}"

    @classmethod
    def parse(cls, text: str) -> JobName:
        """The name in its parts; raises PhalanxError."""
        match = _JOB.fullmatch(text)
        if match is None:
            raise PhalanxError("job", value=text, expected="projects/<project>/jobs/<job>", remedy="correct the name")
        return cls(match[1], match[2])


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint of another job from which a job was forked."""

    project: str
    uid: str
    attempt: Annotated[int, Field(ge=1)]
    step: Annotated[int, Field(ge=0)]

    @property
    def name(self) -> JobName:
        """The other job."""
        return JobName(self.project, self.uid)

    @property
    def checkpoint(self) -> CheckpointRef:
        """Its checkpoint."""
        return CheckpointRef(self.attempt, self.step)


@dataclass(frozen=True, slots=True)
class RegisteredJob:
    """A job as it was submitted.

    storage: URL of `[job] storage`. spec: the job file, resolved, as plain JSON. request_id: of its submission.
    owner: subject of the token that submitted it. created: when, by the clock of the service, for people and for the
    order in which jobs that wait get slots.
    """

    project: str
    uid: str
    storage: str
    spec: Mapping[str, Any] = field(repr=False)
    request_id: str
    owner: str
    created: str = ""
    origin: Origin | None = None

    @property
    def name(self) -> JobName:
        """What the job is called on the wire."""
        return JobName(self.project, self.uid)

    @property
    def key(self) -> str:
        """Where it lies below the cluster's root."""
        return key_of(self.name)

    @property
    def job(self) -> Job:
        """The job file as it was submitted, checked; raises Problems."""
        return parse_job(self.spec, where=str(self.name))

    def store(self) -> ObjectStore:
        """The store rooted at the job: `<job.storage>/projects/<project>/jobs/<uid>/`."""
        settings = self.job.storage_settings(self.storage)
        return open_store(self.storage, StorageSettings(**settings.model_dump())).within(f"{self.name}/")


def key_of(name: JobName) -> str:
    """Where a job lies below the cluster's root."""
    return f"{PREFIX}{name.project}/{name.uid}.json"


class Registry:
    """The registered jobs below the cluster's root `store`.

    Every method may raise what the store raises, and DamagedObject for an object that is not what its key says. Safe
    for several threads and processes at once.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def create_job(self, job: RegisteredJob) -> RegisteredJob:
        """Registers the job; where one of that name is there already, that one is returned, whatever it is."""
        try:
            self._store.create(job.key, encode_document(job))
        except ObjectExists:
            found = self.job(job.project, job.uid)
            if found is None:
                raise DamagedObject(job.key, "exists and can't be read") from None
            return found
        return job

    def job(self, project: str, uid: str) -> RegisteredJob | None:
        """The job, or None where none of that name is registered."""
        name = JobName(project, uid)
        if _JOB.fullmatch(str(name)) is None:
            return None
        try:
            return self._decoded(key_of(name), self._store.read(key_of(name)))
        except ObjectMissing:
            return None

    def names(self, project: str | None = None) -> Iterator[JobName]:
        """The names of all jobs, or of one project's, in their order, as storage has them now."""
        for info in self._store.list(PREFIX if project is None else f"{PREFIX}{project}/"):
            match = _KEY.fullmatch(info.key)
            if match is None:
                raise DamagedObject(info.key, f"is foreign: Phalanx writes nothing of that name below {PREFIX}")
            yield JobName(match[1], match[2])

    def jobs(self, project: str | None = None) -> Iterator[RegisteredJob]:
        """All jobs, or those of one project, by name; each is read as it is asked for."""
        for name in self.names(project):
            found = self.job(name.project, name.uid)
            if found is not None:
                yield found

    def _decoded(self, key: str, data: bytes) -> RegisteredJob:
        job = decode_document(RegisteredJob, key, data)
        if job.key != key:
            raise DamagedObject(key, f"says that it is {job.name}")
        return job
