"""A job's append-only event log, `events/<n>.json` below its root: what was decided and what happened, each once.

An event is created (create-only) before anybody is told of it. Two writers of one number: one wins, the other reads
what won and decides anew. The state of a job is a fold over its events; any database of them is a cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import Field

from phalanx.core.errors import OutsideError
from phalanx.lineage import keys
from phalanx.lineage.documents import decode_document, encode_document
from phalanx.lineage.errors import DamagedObject
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore

PREFIX: Final = "events/"
_KEY: Final = re.compile(rf"{PREFIX}([0-9]{{8}})\.json")


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class EventType(StrEnum):
    """What happened to a job."""

    SUBMITTED = "submitted"
    PREPARING = "preparing"
    PREPARED = "prepared"
    STARTING = "starting"
    RUNNING = "running"
    COMMITTED = "committed"
    INCIDENT = "incident"
    RECOVERING = "recovering"
    STOP_REQUESTED = "stop_requested"
    SUSPEND_REQUESTED = "suspend_requested"
    CHECKPOINT_REQUESTED = "checkpoint_requested"
    RESUMED = "resumed"
    QUEUED = "queued"
    SUSPENDED = "suspended"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something went wrong. kind: as in the contract, in lower case (`process_death`, `nan`). rank, exit_code: None
    where there is none. signal: 0 for none. node_id: "" where it was no node.
    """

    kind: str
    message: str = ""
    rank: int | None = None
    where: str = ""
    detail: str = ""
    signal: int = 0
    exit_code: int | None = None
    node_id: str = ""

    def __str__(self) -> str:
        who = (
            self.node_id if self.rank is None else f"rank {self.rank}" + (f" on {self.node_id}" if self.node_id else "")
        )
        return f"{self.kind}" + (f" of {who}" if who else "") + (f": {self.message}" if self.message else "")


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which ranks of an attempt run on a node."""

    node_id: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event. number: from 1, the job's revision from it on. state: the job's from here on. time: ISO 8601 in UTC by
    the clock of the service, for people only. attempt, step: 0 for none. actor: subject of a token; "" where the
    service decided. data: what the type asks for, as plain JSON. writer: fresh for each event, so that its writer knows
    it after a lost reply.
    """

    number: Annotated[int, Field(ge=1)]
    type: EventType
    state: JobState
    time: str
    writer: str
    attempt: Annotated[int, Field(ge=0)] = 0
    step: Annotated[int, Field(ge=0)] = 0
    actor: str = ""
    request_id: str = ""
    cause: Cause | None = None
    message: str = ""
    placement: tuple[Assignment, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def key_of(number: int) -> str:
    """Where event `number` lies below the job's root."""
    return f"{PREFIX}{keys.number(number)}.json"


class EventLog:
    """The event log of the job whose root `store` is. Every method may raise what the store raises, and DamagedObject
    for an object that is not what its key says. Safe for several threads and processes at once.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def append(self, event: JobEvent) -> bool:
        """Creates the event; False where another one of that number is there. Raises OutsideError where the one before
        it is gone: what is lost must not be begun anew over it.
        """
        self._require_predecessor(event.number)
        data = encode_document(event)
        try:
            self._store.create(key_of(event.number), data)
        except ObjectExists:
            return self._store.read(key_of(event.number)) == data
        return True

    def _require_predecessor(self, number: int) -> None:
        if number == 1:
            return
        try:
            self._store.info(key_of(number - 1))
        except ObjectMissing as error:
            raise OutsideError(
                f"{self._store.url}: event {number - 1} of the job is gone, so event {number} is not written: bring "
                "the storage back as it was"
            ) from error

    def event(self, number: int) -> JobEvent | None:
        """The event of that number, or None where there is none yet."""
        key = key_of(number)
        try:
            found = decode_document(JobEvent, key, self._store.read(key))
        except ObjectMissing:
            return None
        if found.number != number:
            raise DamagedObject(key, f"says that it is event {found.number}")
        return found

    def after(self, number: int) -> Iterator[JobEvent]:
        """The events behind `number`, in order, up to the newest."""
        while (found := self.event(number + 1)) is not None:
            yield found
            number = found.number

    def newest(self) -> int:
        """The number of the last event, by one listing; 0 before the first. Raises DamagedObject for a gap."""
        last = 0
        for info in self._store.list(PREFIX):
            match = _KEY.fullmatch(info.key)
            if match is None:
                raise DamagedObject(info.key, f"is foreign: Phalanx writes nothing of that name below {PREFIX}")
            if int(match[1]) != last + 1:
                raise DamagedObject(info.key, f"has a gap before it: event {last + 1} is missing")
            last = int(match[1])
        return last
