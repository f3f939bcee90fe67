"""The shares of steps that this node keeps in memory, of its own ranks and of those of the node before it.

Memory is taken within a limit that is held against a share before its first byte. A hand-over of a step names the last
step that is sealed, of which every rank has heard that its share lies with two nodes: all other steps of the job leave
then. So a node keeps two steps at most, and the sealed one leaves only after the next one is. The memory of a share
that left is used again by the next one of the job of about its size: its first touch costs more than filling it.
Killed: the memory is gone with the process, and the next agent of the node holds nothing.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from dataclasses import dataclass, field

from phalanx.core import anonymous
from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef
from phalanx.snapshot.replicas import Kept, Placed, fits


@dataclass(frozen=True, slots=True)
class Head:
    """What a share says of itself. draft: of the manifest, as the contract writes it, from rank 0 alone. sealed: the
    step of the same attempt that stays beside this one; 0 for none.
    """

    job: str
    kept: Kept
    sealed: int
    objects: tuple[Placed, ...]
    num_bytes: int
    draft: bytes = field(default=b"", repr=False)

    @property
    def place(self) -> tuple[str, CheckpointRef, int]:
        """What it is kept under."""
        return self.job, self.kept.ref, self.kept.rank


class Pages:
    """Memory that shares of a job lie in, one after another. is_lent: a process of this node may have it mapped, so
    nothing else may ever lie in it.
    """

    def __init__(self, job: str, descriptor: int, memory: mmap.mmap) -> None:
        self.job, self.descriptor, self.memory, self.is_lent = job, descriptor, memory, False
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False

    def close(self) -> None:
        """The pages go with the last who has them mapped."""
        self._close()

    def resize(self, num_bytes: int) -> bool:
        """Whether it has that size now."""
        try:
            self.memory.resize(max(1, num_bytes))
        except (OSError, BufferError, ValueError, SystemError):
            return False
        return True


class _Lease:
    """Who has a share holds this; its end is the end of the share."""

    __slots__ = ("__weakref__", "pages")

    def __init__(self, pages: Pages) -> None:
        self.pages = pages


@dataclass(frozen=True, slots=True)
class Held:
    """A share that lies whole here. descriptor: of its anonymous file. Both are good for as long as somebody has the
    share; a view of its memory alone keeps nothing. checked: keys of objects whose digest was found to hold.
    """

    head: Head
    memory: mmap.mmap
    descriptor: int = -1
    lease: _Lease | None = field(default=None, repr=False, compare=False)
    checked: set[str] = field(default_factory=set, repr=False, compare=False)

    def view(self, each: Placed) -> memoryview:
        """The bytes of one of its objects."""
        return memoryview(self.memory)[each.place]

    def lend(self) -> None:
        """Another process is about to map the memory."""
        if self.lease is not None:
            self.lease.pages.is_lent = True


class ReplicaMemory:
    """What this node keeps of all jobs. max_bytes: of memory together. Safe from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: dict[tuple[str, CheckpointRef, int], Held] = {}
        self._coming: dict[tuple[str, CheckpointRef, int], Head] = {}
        self._jobs: set[str] = set()
        self._spare: list[Pages] = []  # appended to without the lock, wherever the last who has a share lets it go
        self._lock = threading.Lock()
        self.allocated_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory that is held or promised; spare memory makes way for it."""
        with self._lock:
            return self._num_bytes()

    @property
    def spare_bytes(self) -> int:
        """Memory of shares that left, to be used again."""
        return sum(len(pages.memory) for pages in tuple(self._spare))

    def begin(self, head: Head) -> None:
        """Makes room for a share; steps that it says to be over leave. One that is here already comes anew. Raises
        PhalanxError for a step that is older than what is kept, OutsideError where there is no room.
        """
        ref, stays = head.kept.ref, CheckpointRef(head.kept.ref.attempt, head.sealed)
        if not fits(head.objects, head.num_bytes):
            raise PhalanxError(
                f"share of {ref}", expected="objects one behind the other", remedy="announce the share as it lies"
            )
        with self._lock:
            newest = max((at for job, at, _ in (*self._held, *self._coming) if job == head.job), default=ref)
            if ref < newest:
                raise PhalanxError(f"share of {ref}", expected=f"a step from {newest} on", remedy="leave it out")
            for places in (self._held, self._coming):
                for place in [each for each in places if each[0] == head.job and each[1] not in (ref, stays)]:
                    del places[place]
                places.pop(head.place, None)
            taken = self._num_bytes()
            if taken + head.num_bytes > self.max_bytes:
                raise OutsideError(
                    f"no room for {head.num_bytes} bytes of {ref}: {taken} of {self.max_bytes} bytes are taken"
                )
            self._coming[head.place] = head
            self._jobs.add(head.job)

    def fresh(self, head: Head) -> Held:
        """Memory for a share that has begun, to be filled; it counts once it is finished. Raises OSError."""
        with self._lock:
            pages = self._fitting(head)
            self._trim()
        if pages is None:
            pages = _new_pages(head)
            self.allocated_bytes += head.num_bytes
        lease = _Lease(pages)
        weakref.finalize(lease, _let_go, weakref.ref(self), pages).atexit = False
        return Held(head, pages.memory, pages.descriptor, lease)

    def finish(self, held: Held) -> None:
        """The share has come, and its digests hold. Raises OutsideError for one that was overtaken meanwhile."""
        head = held.head
        with self._lock:
            if self._coming.get(head.place) is not head:
                raise OutsideError(f"share of {head.kept.ref}: overtaken by another")
            del self._coming[head.place]
            self._held[head.place] = held

    def give_up(self, head: Head) -> None:
        """The share will not come."""
        with self._lock:
            if self._coming.get(head.place) is head:
                del self._coming[head.place]

    def kept(self, job: str) -> list[Kept]:
        """The shares of a job that lie whole here."""
        with self._lock:
            return sorted(held.head.kept for (of, _, _), held in self._held.items() if of == job)

    def held(self, job: str, ref: CheckpointRef) -> list[Held]:
        """Those of one step, by rank. They stay readable for whoever has them."""
        with self._lock:
            found = {rank: held for (of, at, rank), held in self._held.items() if (of, at) == (job, ref)}
        return [found[rank] for rank in sorted(found)]

    def forget(self, job: str) -> None:
        """The job is over."""
        with self._lock:
            self._jobs.discard(job)
            for places in (self._held, self._coming):
                for place in [each for each in places if each[0] == job]:
                    del places[place]
            self._trim()

    def _fitting(self, head: Head) -> Pages | None:
        """Spare memory that is made to fit, at a change of its size by less than a quarter."""
        for pages in tuple(self._spare):
            size = len(pages.memory)
            if pages.job == head.job and 3 * size <= 4 * max(1, head.num_bytes) and 3 * head.num_bytes <= 4 * size:
                self._spare.remove(pages)
                if pages.resize(head.num_bytes):
                    return pages
                pages.close()
        return None

    def _trim(self) -> None:
        """Drops spare memory that has no room beside the rest, and that of jobs that are over."""
        room = self.max_bytes - self._num_bytes()
        for pages in reversed(tuple(self._spare)):
            room -= len(pages.memory)
            if room < 0 or pages.job not in self._jobs:
                self._spare.remove(pages)
                pages.close()

    def let_go(self, pages: Pages) -> None:
        """Nobody has a share in these pages any more. Takes no lock: it runs wherever that happens, also under ours."""
        if pages.is_lent or pages.job not in self._jobs:
            pages.close()
        else:
            self._spare.append(pages)

    def _num_bytes(self) -> int:
        return sum(held.head.num_bytes for held in self._held.values()) + sum(
            head.num_bytes for head in self._coming.values()
        )


def _let_go(memory: weakref.ref[ReplicaMemory], pages: Pages) -> None:
    """Nobody has the share any more; the node may have stopped keeping any."""
    place = memory()
    if place is None:
        pages.close()
    else:
        place.let_go(pages)


def _new_pages(head: Head) -> Pages:
    descriptor = os.memfd_create("phalanx-share", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(1, head.num_bytes))
        memory = anonymous.mapped(descriptor, head.num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    return Pages(head.job, descriptor, memory)


def mapped(head: Head, descriptor: int) -> Held:
    """The share in an anonymous file of somebody else, which is closed with its last user here. Raises OSError."""
    try:
        memory = anonymous.mapped(descriptor, head.num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(memory, os.close, descriptor)
    return Held(head, memory, descriptor)


def check_digests(held: Held) -> None:
    """Raises OutsideError where an object is not what was announced."""
    for each in held.head.objects:
        check_digest(held, each)


def check_digest(held: Held, each: Placed) -> None:
    """Raises OutsideError where this object is not what was announced. Looks once, as a share does not change."""
    if each.ref.key not in held.checked:
        with held.view(each) as view:
            if xxh3(view) != each.ref.digest:
                raise OutsideError(f"share of {held.head.kept.ref}: {each.ref.key} has other bytes than were announced")
        held.checked.add(each.ref.key)
