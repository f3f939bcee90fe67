"""The shares of steps that this node keeps in memory, of its own ranks and of those of the node before it.

Memory is taken within a limit that is held against a share before its first byte. A hand-over of a step names the last
step that is sealed, of which every rank has heard that its share lies with two nodes: all other steps of the job leave
then. So a node keeps two steps at most, and the sealed one leaves only after the next one is. Killed: the memory is
gone with the process, and the next agent of the node holds nothing.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Held:
    """A share that lies whole here. descriptor: of its anonymous file; open for as long as `memory` lives."""

    head: Head
    memory: mmap.mmap
    descriptor: int = -1

    def view(self, each: Placed) -> memoryview:
        """The bytes of one of its objects."""
        return memoryview(self.memory)[each.place]


class ReplicaMemory:
    """What this node keeps of all jobs. max_bytes: of memory together. Safe from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: dict[tuple[str, CheckpointRef, int], Held] = {}
        self._coming: dict[tuple[str, CheckpointRef, int], Head] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory that is held or promised."""
        with self._lock:
            return self._num_bytes()

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
            for places in (self._held, self._coming):
                for place in [each for each in places if each[0] == job]:
                    del places[place]

    def _num_bytes(self) -> int:
        return sum(held.head.num_bytes for held in self._held.values()) + sum(
            head.num_bytes for head in self._coming.values()
        )


def new_memory(head: Head) -> Held:
    """Anonymous memory for a share, to be filled."""
    descriptor = os.memfd_create("phalanx-share", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(1, head.num_bytes))
    except OSError:
        os.close(descriptor)
        raise
    return mapped(head, descriptor, mmap.PROT_READ | mmap.PROT_WRITE)


def mapped(head: Head, descriptor: int, protection: int = mmap.PROT_READ) -> Held:
    """The share in an anonymous file, which is closed with its last user. Raises OSError."""
    try:
        memory = mmap.mmap(descriptor, max(1, head.num_bytes), flags=mmap.MAP_SHARED, prot=protection)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(memory, os.close, descriptor)
    return Held(head, memory, descriptor)


def check_digests(held: Held) -> None:
    """Raises OutsideError where an object is not what was announced."""
    for each in held.head.objects:
        with held.view(each) as view:
            if xxh3(view) != each.ref.digest:
                raise OutsideError(f"share of {held.head.kept.ref}: {each.ref.key} came with other bytes")
