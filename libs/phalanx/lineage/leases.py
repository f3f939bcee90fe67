"""Leases: whoever reads or copies a checkpoint says so in storage, and no collector removes it meanwhile, in whatever
process and on whatever machine the two run. A collector's side is `lease_book`.

A lease is `leases/a<A>/s<step>/<purpose>-<id>/<n>.json`. To renew it is to create number n + 1 and delete n; to end it
is to delete what is left. Objects are created once, so there is no clock in it: a collector takes a lease for ended
once nothing of it has changed for `expiry_s` of the collector's own monotonic clock.

A reader and a removal cannot miss each other. The reader creates its lease, then asks whether a removal has marked the
checkpoint; the removal marks it (a lease of the purpose `removal`), then asks whether anybody has a lease. Whoever
comes second gives way. A removal renews its mark, and a reader waits a little for a mark to go: one of which nothing
changes was left by a removal that was killed, and keeps nobody out. Nor can a lease be lost unnoticed, where its holder
was stopped for longer than the expiry: a removal begins with the manifest, which never comes back, and the holder looks
for it at the end.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import keys
from phalanx.lineage.documents import encode_document
from phalanx.lineage.values import CheckpointRef
from phalanx.objects import ObjectMissing, ObjectStore, StoreDenied, StoreError

RENEW_S: Final = 10.0
REMOVAL: Final = "removal"
MARK_RENEW_S: Final = 2.0
MARK_EXPIRY_S: Final = 6 * MARK_RENEW_S
PATIENCE_S: Final = 2 * MARK_EXPIRY_S
_LOOK_S: Final = 0.25
_LOG = logging.getLogger(__name__)


class CheckpointRemoved(OutsideError):
    """The checkpoint was removed while somebody read it whose lease had ended; what was read is worth nothing."""


class BeingRemoved(PhalanxError):
    """A removal of the checkpoint has begun: no reader may begin."""


@dataclass(frozen=True, slots=True)
class LeaseNote:
    """One sign of life, for people to read. holder: host and process."""

    attempt: Annotated[int, Field(ge=1)]
    step: Annotated[int, Field(ge=0)]
    purpose: str
    number: Annotated[int, Field(ge=1)]
    holder: str


class Lease:
    """A lease that is held. Its thread renews it; every method may be called by any thread."""

    def __init__(self, store: ObjectStore, ref: CheckpointRef, purpose: str) -> None:
        if not purpose.isascii() or not purpose.isalpha() or not purpose.islower():
            raise ValueError(f"the purpose {purpose!r} of a lease is not one word of lower-case letters")
        self._store, self._ref, self._purpose = store, ref, purpose
        self.name = f"{purpose}-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._number = 0
        self._renewed_s = float("-inf")
        self._left: set[int] = set()
        self._ended = threading.Event()

    def renew(self) -> None:
        """One sign of life more, and those before it gone. Raises what the store raises."""
        with self._lock:
            if self._ended.is_set():
                return
            number, old, begun_s = self._number + 1, set(self._left), time.monotonic()
            note = LeaseNote(self._ref.attempt, self._ref.step, self._purpose, number, _holder())
            self._left.add(number)
            try:
                self._store.create(keys.lease(self._ref, self.name, number), encode_document(note))
            except StoreDenied:
                self._left.discard(number)  # nothing is there, and nothing could be deleted
                raise
            self._number, self._renewed_s = number, begun_s
            self._delete(old)

    def age_s(self) -> float:
        """Seconds since the last sign of life that storage took."""
        return time.monotonic() - self._renewed_s

    def end(self) -> None:
        """Removes the lease; where that fails it expires by itself."""
        self._ended.set()
        with self._lock:
            try:
                self._delete(set(self._left))
            except (StoreError, StoreDenied) as error:
                _LOG.warning("lease %s on checkpoint %s expires by itself: %s", self.name, self._ref, error)

    def keep_renewing(self, every_s: float) -> None:
        """Renews until the lease is ended; what fails is tried again."""
        while not self._ended.wait(every_s):
            try:
                self.renew()
            except (StoreError, StoreDenied) as error:
                _LOG.warning("lease %s on checkpoint %s was not renewed: %s", self.name, self._ref, error)

    def _delete(self, numbers: set[int]) -> None:
        for number in sorted(numbers):
            self._store.delete(keys.lease(self._ref, self.name, number))
            self._left.discard(number)


@contextmanager
def leased(store: ObjectStore, ref: CheckpointRef, purpose: str, *, renew_s: float = RENEW_S) -> Iterator[Lease]:
    """Inside the block no collector removes the checkpoint `ref` of the job whose root `store` is. Read its manifest
    inside too: one that is not there is not made to be.

    purpose: one word of lower-case letters, for whoever asks why the checkpoint stays. A reader that may not write to
    the store goes on without a lease, and a warning says so. Waits, some seconds at most, for a removal that has begun;
    raises BeingRemoved where that takes the checkpoint, CheckpointRemoved at the end where it was removed nonetheless
    (the reader was stopped for long).
    """
    lease = Lease(store, ref, purpose)
    renewing = threading.Thread(target=lease.keep_renewing, args=(renew_s,), name=f"lease {ref}", daemon=True)
    try:
        if _taken(lease, store, ref):
            renewing.start()
        was_there = _has_manifest(store, ref)
        try:
            yield lease
        except Exception as error:
            if was_there and not _has_manifest(store, ref):
                raise _removed(store, ref) from error
            raise
        if was_there and not _has_manifest(store, ref):
            raise _removed(store, ref)
    finally:
        lease.end()


def _taken(lease: Lease, store: ObjectStore, ref: CheckpointRef) -> bool:
    """Takes the lease, unless the checkpoint is being removed; False where this reader may not write."""
    try:
        lease.renew()
    except StoreDenied as error:
        _LOG.warning("checkpoint %s is read without a lease, so retention may remove it meanwhile: %s", ref, error)
        return False
    _wait_for_marks(store, ref)
    return True


def _wait_for_marks(store: ObjectStore, ref: CheckpointRef) -> None:
    """Waits until no removal of the checkpoint is under way; BeingRemoved where it is removed, or that takes long."""
    begun_s = since_s = time.monotonic()
    seen: set[str] = set()
    while marks := _marks(store, ref):
        now_s = time.monotonic()
        if marks != seen:
            seen, since_s = marks, now_s
        if now_s - begun_s >= PATIENCE_S:
            raise _being_removed(store, ref)
        if now_s - since_s >= MARK_EXPIRY_S:
            _LOG.warning("checkpoint %s was marked by a removal that ended before it removed anything", ref)
            return
        time.sleep(_LOOK_S)
    if seen and not _has_manifest(store, ref):
        raise _being_removed(store, ref)


def _being_removed(store: ObjectStore, ref: CheckpointRef) -> BeingRemoved:
    return BeingRemoved(
        f"checkpoint {ref} at {store.url}",
        value="being removed",
        expected="one that retention keeps",
        remedy="choose another; a removal that was killed is finished by the next `phalanx checkpoint prune`",
    )


@contextmanager
def removal_mark(store: ObjectStore, ref: CheckpointRef) -> Iterator[Lease]:
    """Marks a checkpoint as being removed: inside the block no reader takes a lease on it, as long as the mark is
    renewed. Whoever marks it asks `readers` afterwards, and `may_remove` right before the manifest goes.
    """
    mark = Lease(store, ref, REMOVAL)
    mark.renew()
    threading.Thread(target=mark.keep_renewing, args=(MARK_RENEW_S,), name=f"mark {ref}", daemon=True).start()
    try:
        yield mark
    finally:
        mark.end()


def may_remove(mark: Lease) -> bool:
    """Whether no reader can take the mark for left behind before the manifest is gone, this process being slow."""
    return mark.age_s() < MARK_EXPIRY_S / 2


def is_mark(name: str) -> bool:
    """Whether a lease of that name is the mark of a removal."""
    return name.startswith(f"{REMOVAL}-")


def _marks(store: ObjectStore, ref: CheckpointRef) -> set[str]:
    """The keys of the marks on a checkpoint; they change with each renewal."""
    listed = ((info.key, keys.lease_parts(info.key)) for info in store.list(keys.leases_of(ref)))
    return {key for key, parts in listed if parts is not None and is_mark(parts[1])}


def _has_manifest(store: ObjectStore, ref: CheckpointRef) -> bool:
    try:
        store.info(keys.manifest(ref))
    except ObjectMissing:
        return False
    return True


def _removed(store: ObjectStore, ref: CheckpointRef) -> CheckpointRemoved:
    return CheckpointRemoved(
        f"checkpoint {ref} at {store.url} was removed while it was read, as its lease had not been renewed for long: "
        "read another one, or pin it first"
    )


def _holder() -> str:
    return f"{socket.gethostname()} process {os.getpid()}"
