"""Jobs as this service sees them: found by name in the registry, their journals read from storage as it is now."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol, TypeVar

from phalanx.data.plans import JournalView
from phalanx.lineage import JournalEntry, Lineage, keys
from phalanx.lineage.registry import JobName
from phalanx.objects import ObjectStore
from phalanx.rpc.errors import NotFound
from phalanx.spec import Job

KEPT_JOURNALS = 1024
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A registered job: what it is, and the store rooted at it."""

    name: JobName
    job: Job
    store: ObjectStore

    @property
    def lineage(self) -> Lineage:
        """Its attempts and journal."""
        return Lineage(self.store)


class JobSource(Protocol):
    """Where jobs are found."""

    def find(self, name: JobName) -> FoundJob | None:
        """The job as it was submitted, or None where none of that name is registered."""

    def current(self, found: FoundJob) -> Job:
        """The job file as it holds now: a resumed job may have other steps, URLs and policies."""


def require_job(jobs: JobSource, name: JobName) -> FoundJob:
    """The job; raises NotFound."""
    found = jobs.find(name)
    if found is None:
        raise NotFound(
            "job", value=str(name), expected="a job that was submitted", remedy="`phalanx job ls` lists them"
        )
    return found


def keep(kept: OrderedDict[Key, Value], key: Key, value: Value, capacity: int) -> None:
    """Enters a value; the one entered longest ago goes where there are more than `capacity`."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > capacity:
        kept.popitem(last=False)


class Journals:
    """The newest attempt of a job and its journal, by two listings a call; objects are read only when a listing differs
    from the one before, as no object ever changes.

    The attempts are listed anew in every call: an attempt that was superseded before the call began is seen to be.
    """

    def __init__(self, capacity: int = KEPT_JOURNALS) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[JobName, tuple[tuple[str, ...], JournalView]] = OrderedDict()
        self._lock = threading.Lock()

    def view(self, found: FoundJob) -> JournalView:
        """What holds now; raises what the store raises, DamagedObject for an object that is not what its key says."""
        attempts = tuple(info.key for info in found.store.list(keys.ATTEMPTS))
        newest = keys.attempt_number(attempts[-1]) if attempts else None
        if newest is None:
            return JournalView(0, ())
        listing = (attempts[-1], *(info.key for info in found.store.list(keys.journal(newest))))
        with self._lock:
            kept = self._kept.get(found.name)
        if kept is not None and kept[0] == listing:
            return kept[1]
        return self._read(found, newest, listing)

    def _read(self, found: FoundJob, newest: int, listing: tuple[str, ...]) -> JournalView:
        entries: tuple[JournalEntry, ...] = found.lineage.journal(newest)
        view = JournalView(newest, entries)
        # An entry that came after our listing belongs to a later listing: it is read again then.
        with self._lock:
            keep(self._kept, found.name, (listing, view), self._capacity)
        return view
