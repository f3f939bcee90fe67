"""A job's lineage in storage: every decision is one create-only object, so a kill between any two operations leaves
nothing half-written.

Nothing is cached: who opens an attempt lists and reads anew. A reply that was lost after the object had been created is
recognised by the object's bytes (`job_objects`). Keys are in `keys`, the live rule in `chain`, the byte forms in
`encoding`; the step records are in `step_records`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

from phalanx.core.digest import xxh3
from phalanx.core.errors import PhalanxError
from phalanx.lineage import keys
from phalanx.lineage.chain import Link, walk
from phalanx.lineage.encoding import decode, encode
from phalanx.lineage.errors import DamagedObject
from phalanx.lineage.job import position_after, require_same_identity, require_same_origin
from phalanx.lineage.job_objects import JobObjects
from phalanx.lineage.journal import journal_digest
from phalanx.lineage.lists import decode_refs
from phalanx.lineage.step_records import StepRecords
from phalanx.lineage.values import (
    Attempt,
    CheckpointRef,
    ForkPoint,
    JobRecord,
    JournalEntry,
    Manifest,
    ObjectRef,
)
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore

LOG = logging.getLogger(__name__)
MAX_MANIFEST_BYTES: Final = 1 << 20


def _new_request_id() -> str:
    return uuid.uuid4().hex


class Lineage:
    """The lineage of the job whose root `store` is (`projects/<p>/jobs/<uid>/`).

    Every method may raise what the store raises; every one that reads raises DamagedObject for an object that is not
    what its key says. Safe for several threads and processes at once.
    """

    def __init__(self, store: ObjectStore, new_request_id: Callable[[], str] = _new_request_id) -> None:
        self._store, self._objects = store, JobObjects(store)
        self._new_request_id = new_request_id
        self.records = StepRecords(self, self._objects)

    # The job.

    def create_job(
        self,
        *,
        request_id: str,
        spec: Mapping[str, Any],
        identity: Mapping[str, Any],
        identity_digest: str,
        origin: ForkPoint | None = None,
    ) -> JobRecord:
        """Creates the job, or continues the one that is there if its identity is the same; returns what is stored.

        Raises PhalanxError, naming the keys that differ, where a job of another identity or origin has this name.
        """
        job = JobRecord(request_id, dict(spec), dict(identity), identity_digest, origin)
        try:
            self._store.create(keys.JOB, encode(job))
        except ObjectExists:
            stored = self._objects.read(JobRecord, keys.JOB)
            require_same_identity(stored, job, self._store.url)
            require_same_origin(stored, job, self._store.url)
            return stored
        return job

    def read_job(self) -> JobRecord | None:
        """The job as it was created, or None where there is none."""
        try:
            return decode(JobRecord, keys.JOB, self._store.read(keys.JOB))
        except ObjectMissing:
            return None

    def windows_of(self, first_step: int, last_step: int, global_batch_size: int) -> tuple[int, int]:
        """The half-open range of window positions that the steps first_step .. last_step (both included) read."""
        job = self.read_job()
        origin = None if job is None else job.origin
        return (
            position_after(first_step - 1, global_batch_size, origin),
            position_after(last_step, global_batch_size, origin),
        )

    @property
    def url(self) -> str:
        """Of the job's root."""
        return self._store.url

    # Attempts and the live chain.

    def attempts(self) -> tuple[Attempt, ...]:
        """All attempts, live or not, by number."""
        return tuple(self._attempt(number) for number in self._attempt_numbers())

    def newest_attempt(self) -> Attempt | None:
        """The attempt that is not superseded, or None before the first."""
        numbers = self._attempt_numbers()
        return self._attempt(numbers[-1]) if numbers else None

    def chain(self) -> tuple[Link, ...]:
        """The live chain, oldest first; empty before the first attempt."""
        return tuple(self._walk())[::-1]

    def checkpoints(self) -> tuple[CheckpointRef, ...]:
        """The live checkpoints, oldest first."""
        return tuple(ref for link in self.chain() for ref in self._live_checkpoints(link))

    def open_attempt(
        self,
        *,
        code_digest: str,
        identity_digest: str,
        placement: Mapping[str, Any],
        avoid: Collection[CheckpointRef] = (),
        request_id: str | None = None,
    ) -> Attempt:
        """Opens the next attempt: its parent is the newest live checkpoint that is not in `avoid` (None: it starts from
        the beginning). A `request_id` that the newest attempt already has returns that attempt.

        From the moment in which this returns nothing that an older attempt writes can become live. Another opener that
        takes the number first makes this one read anew. Raises PhalanxError if the parent has another identity, or
        if a fork has no checkpoint to start from; DamagedObject if the parent's manifest is damaged (`.checkpoint` then
        says what to avoid).
        """
        request = request_id or self._new_request_id()
        while True:
            number, parent, link = self._next_parent(avoid)
            # Asked of the very attempt before `number`: whoever opens one in between takes that number from this one.
            if request_id and number > 1 and (newest := self._attempt(number - 1)).request_id == request:
                return newest
            if parent is not None:
                self._require_identity(parent, identity_digest)
            else:
                self._require_no_origin()
            entries, journal = self._inherited(parent, link)
            attempt = Attempt(
                number,
                parent,
                journal,
                journal_digest(entries),
                code_digest,
                identity_digest,
                dict(placement),
                request,
            )
            if self._objects.created(keys.attempt(number), encode(attempt)):
                return attempt

    def open_import(self, origin: ForkPoint, *, code_digest: str, identity_digest: str) -> Attempt:
        """Opens the first attempt of a fork, which trains nothing: the copy of its origin's checkpoint lies below it.
        Said twice it is one. Raises PhalanxError where the job has begun in another way.
        """
        placement = {"import": origin.plain()}
        none = journal_digest(())
        attempt = Attempt(1, None, (), none, code_digest, identity_digest, placement, f"import of {origin}")
        if self._objects.created(keys.attempt(1), encode(attempt)):
            return attempt
        found = self._attempt(1)
        if (found.placement, found.identity_digest) != (placement, identity_digest):
            raise PhalanxError(
                f"job at {self._store.url}",
                expected=f"one whose first attempt is the import of {origin}",
                remedy="give the job another [job] name",
            )
        return found

    # The journal.

    def journal(self, attempt: int) -> tuple[JournalEntry, ...]:
        """The entries that hold for `attempt`, in their order: its ancestors' (as it named them when it was opened) and
        its own.

        Raises DamagedObject if the ancestors' entries are not those that it named.
        """
        own = self._attempt(attempt)
        inherited = tuple(entry for ancestor, last in own.journal for entry in self._entries(ancestor, last))
        if journal_digest(inherited) != own.journal_digest:
            raise DamagedObject(
                keys.attempt(attempt), "names another journal of its ancestors than the one that is there"
            )
        return inherited + self._entries(attempt)

    def all_journal_entries(self) -> Iterator[JournalEntry]:
        """Every entry that any attempt wrote, live or not, each read once.

        One that is damaged is left out, with a warning in the log, unless it is live: what a dead attempt left behind
        must not hold up the living.
        """
        for info in self._store.list(keys.JOURNAL):
            try:
                entry = self._objects.read(JournalEntry, info.key)
                if keys.journal_entry(entry.attempt, entry.number) != info.key:
                    raise DamagedObject(info.key, f"says that it is entry {entry.number} of attempt {entry.attempt}")
            except DamagedObject as error:
                if self._is_live_entry(info.key):
                    raise
                LOG.warning("left out, as it is not live: %s", error)
            else:
                yield entry

    def append_journal(
        self, attempt: int, kind: str, position: int, payload: Mapping[str, Any], *, request_id: str | None = None
    ) -> JournalEntry:
        """Appends an entry that holds from window `position` on, and returns it as stored.

        A `request_id` that the attempt's journal already has returns that entry: so a caller may repeat a request whose
        reply was lost.
        """
        request = request_id or self._new_request_id()
        while True:
            entries = self._entries(attempt)
            for entry in entries:
                if entry.request_id == request:
                    return entry
            entry = JournalEntry(attempt, len(entries) + 1, kind, position, dict(payload), request)
            if self._objects.created(keys.journal_entry(attempt, entry.number), encode(entry)):
                return entry

    # Checkpoints.

    def commit(self, manifest: Manifest) -> None:
        """Makes the checkpoint exist, by one create-only put; the same manifest again is recognised as done.

        Whether it is live is not asked: the chain decides. Raises ValueError for a step that is not after the attempt's
        parent or a root of 1 MiB or more, DamagedObject if a different manifest is there.
        """
        start = self._attempt(manifest.attempt)
        if start.parent is not None and manifest.step <= start.parent.step:
            raise ValueError(f"step {manifest.step} is not after the parent of its attempt, {start.parent}")
        data = encode(manifest)
        if len(data) >= MAX_MANIFEST_BYTES:
            raise ValueError(f"manifest root of {len(data)} bytes; expected less than {MAX_MANIFEST_BYTES}")
        self._objects.create_once(keys.manifest(manifest.ref), data)

    def manifest(self, ref: CheckpointRef) -> Manifest:
        """The manifest of a checkpoint, read anew and checked."""
        key = keys.manifest(ref)
        manifest = self._objects.read(Manifest, key)
        if manifest.ref != ref:
            raise DamagedObject(key, f"says that it is {manifest.ref}")
        return manifest

    def part_refs(self, manifest: Manifest) -> Iterator[ObjectRef]:
        """The parts of a checkpoint, by rank, those in its lists included."""
        yield from manifest.parts
        for ref in manifest.part_lists:
            yield from decode_refs(ref.key, self.read_verified(ref))

    def put(self, key: str, data: bytes) -> ObjectRef:
        """Creates an object that nobody else writes with other content, and names it; again is recognised as done."""
        self._objects.create_once(key, data)
        return ObjectRef(key, len(data), xxh3(data))

    def read_verified(self, ref: ObjectRef) -> bytes:
        """The bytes of any object that a manifest names. Raises DamagedObject unless size and digest are those of
        `ref`.
        """
        return self._objects.read_verified(ref)

    def retire(self, ref: CheckpointRef) -> None:
        """Keeps the manifest's bytes under `keys.retired`, so that the records it names stay provable when the
        checkpoint is deleted. The checkpoint exists for as long as its manifest does; again is recognised as done.
        """
        self._objects.create_once(keys.retired(ref), self._objects.read_bytes(keys.manifest(ref)))

    def retired(self, ref: CheckpointRef) -> Manifest | None:
        """What the manifest said of a checkpoint that was retired; None for one that was not."""
        try:
            return decode(Manifest, keys.retired(ref), self._store.read(keys.retired(ref)))
        except ObjectMissing:
            return None

    # Below: what the above share.

    def _attempt(self, number: int) -> Attempt:
        attempt = self._objects.read(Attempt, keys.attempt(number))
        if attempt.number != number:
            raise DamagedObject(keys.attempt(number), f"says that it is attempt {attempt.number}")
        return attempt

    def _attempt_numbers(self) -> tuple[int, ...]:
        return self._objects.numbers(keys.ATTEMPTS, keys.attempt_number)

    def _walk(self) -> Iterator[Link]:
        """The live chain from its tip backwards, reading no further than the caller goes."""
        numbers = self._attempt_numbers()
        return walk(self._attempt, numbers[-1]) if numbers else iter(())

    def _live_checkpoints(self, link: Link) -> tuple[CheckpointRef, ...]:
        listed = self._store.list(keys.checkpoints_of(link.attempt.number))
        refs = (keys.manifest_ref(info.key) for info in listed)
        return tuple(ref for ref in refs if ref is not None and link.has_step(ref.step))

    def _next_parent(self, avoid: Collection[CheckpointRef]) -> tuple[int, CheckpointRef | None, Link | None]:
        """Number of the next attempt, and the newest live checkpoint that is not in `avoid` with its attempt's link."""
        number = 1
        for index, link in enumerate(self._walk()):
            if index == 0:
                number = link.attempt.number + 1
            live = [ref for ref in self._live_checkpoints(link) if ref not in avoid]
            if live:
                return number, max(live), link
        return number, None, None

    def _require_identity(self, parent: CheckpointRef, identity_digest: str) -> None:
        found = self.manifest(parent).identity_digest
        if found != identity_digest:
            raise PhalanxError(
                f"checkpoint {parent} at {self._store.url}",
                value=found,
                expected=f"the identity {identity_digest} of this job",
                remedy="give the job another [job] name to start a new one",
            )

    def _require_no_origin(self) -> None:
        """A fork never starts from nothing: that would be another run than the one that was asked for."""
        job = self.read_job()
        if job is not None and job.origin is not None:
            raise PhalanxError(
                f"job at {self._store.url}",
                expected=f"a checkpoint to start from, at least the copy of {job.origin}",
                remedy="fork or import again: under this name if that was not finished, under another if it is damaged",
            )

    def _inherited(
        self, parent: CheckpointRef | None, link: Link | None
    ) -> tuple[tuple[JournalEntry, ...], tuple[tuple[int, int], ...]]:
        """The entries that a child of `parent` inherits, and how many of each ancestor they are."""
        if parent is None or link is None:
            return (), ()
        own = self._entries(parent.attempt, link.last_entry)
        inherited = tuple(entry for ancestor, last in link.attempt.journal for entry in self._entries(ancestor, last))
        return inherited + own, (*link.attempt.journal, (parent.attempt, len(own)))

    def _entries(self, attempt: int, last: int | None = None) -> tuple[JournalEntry, ...]:
        """The first `last` entries that `attempt` wrote, or all that are there."""
        if last is None:
            numbers = self._objects.numbers(keys.journal(attempt), keys.journal_entry_number)
            last = len(numbers)
        return tuple(self._entry(attempt, number) for number in range(1, last + 1))

    def _is_live_entry(self, key: str) -> bool:
        number = keys.journal_entry_number(key)
        return number is not None and any(
            link.has_entry(number) and key == keys.journal_entry(link.attempt.number, number) for link in self.chain()
        )

    def _entry(self, attempt: int, number: int) -> JournalEntry:
        key = keys.journal_entry(attempt, number)
        entry = self._objects.read(JournalEntry, key)
        if (entry.attempt, entry.number) != (attempt, number):
            raise DamagedObject(key, f"says that it is entry {entry.number} of attempt {entry.attempt}")
        return entry
