"""One rank's share of a step in memory that its agent can take over: captured like a save, created nowhere.

The memory is an anonymous file (memfd): the agent maps the very pages, so no byte is copied on the way, and they live
for as long as anybody holds them. It may be used for one share after the other, once no agent keeps what lay in it: the
first touch of memory costs more than the copy. Killed anywhere: what no agent has mapped goes with the process.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from phalanx.core import anonymous
from phalanx.core.box import HeldTensor
from phalanx.core.digest import BytesLike, xxh3
from phalanx.lineage import ObjectRef
from phalanx.objects import ObjectExists, ObjectInfo, ObjectMissing, ObjectStore, StoreError
from phalanx.objects.base import ObjectWriter
from phalanx.snapshot import background
from phalanx.snapshot.capture import HostBuffer, owned_boxes
from phalanx.snapshot.grouping import PlannedObject, buffer_bytes, plan_objects
from phalanx.snapshot.parts import Part
from phalanx.snapshot.replicas import Placed
from phalanx.snapshot.share import Share

Records = Callable[[ObjectStore], tuple[ObjectRef, ...]]


@dataclass(frozen=True, slots=True)
class Taken:
    """A share that lies whole in the anonymous file `fd`. objects: in the order in which storage gets them."""

    fd: int
    num_bytes: int
    objects: tuple[Placed, ...]


class SmallObjects(ObjectStore):
    """Keeps what is created, in order; for a few small objects."""

    url = "memory of this rank"

    def __init__(self) -> None:
        self.created: dict[str, bytes] = {}

    def create(self, key: str, data: BytesLike) -> None:
        if key in self.created:
            raise ObjectExists(key)
        self.created[key] = bytes(data)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self.created.get(key)
        if data is None:
            raise ObjectMissing(key)
        return data[offset:] if length is None else data[offset : offset + length]

    def info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.read(key)))

    def version(self, key: str) -> str:
        raise StoreError(f"{key}: this memory has no versions")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (ObjectInfo(key, len(data)) for key, data in sorted(self.created.items()) if key.startswith(prefix))

    def children(self, prefix: str = "") -> Iterator[str]:
        raise StoreError(f"{prefix}: this memory has no folders")

    def writer(self, key: str) -> ObjectWriter:
        raise StoreError(f"{key}: objects of this memory are created whole")

    def delete(self, key: str) -> None:
        self.created.pop(key, None)


class ShareMemory:
    """Anonymous memory for one share at a time. It grows to the largest; it never shrinks, as others map it. It goes
    with its last user here, except for those who have mapped it.
    """

    def __init__(self) -> None:
        self.fd = anonymous.new_file("phalanx-step")
        self._close = weakref.finalize(self, os.close, self.fd)
        self.buffer = HostBuffer(partial(_mapped, self.fd))

    @property
    def allocated_bytes(self) -> int:
        """Memory that the system has given for it."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Call it once nothing is being put there."""
        self._close()


def _mapped(fd: int, num_bytes: int) -> torch.Tensor:
    if os.fstat(fd).st_size < max(1, num_bytes):
        os.ftruncate(fd, max(1, num_bytes))
    memory = anonymous.mapped(fd, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


class ReplicaCapture:
    """A share that is being taken. `captured` is done once the tensors may change; `result` once all of it lies in
    memory, hashed. What lies in `memory` then must stay for as long as an agent keeps it.

    head: of the part object. records: stores the step records in the store that it is given. memory: in which no
    other capture is under way.
    """

    def __init__(
        self, head: Part, tensors: Sequence[HeldTensor], records: Records, memory: ShareMemory | None = None
    ) -> None:
        owned, sources = owned_boxes(tensors)
        self._objects = plan_objects(owned)
        self._head, self._records = head, records
        self.memory = memory if memory is not None else ShareMemory()
        self.captured = self.memory.buffer.capture(self._objects, sources)
        self.result: Future[Taken] = background.begin(self._take, "replica-take")

    def _take(self) -> Taken:
        memory = self.captured.result()[: buffer_bytes(self._objects)]
        small = SmallObjects()
        share = Share(_Unstored(small), self._head)
        written = [share.from_memory(n, each, _of(each, memory)) for n, each in enumerate(self._objects)]
        share.finish(written, self._records(small))
        placed = [
            Placed(ObjectRef(done.stored.key, done.stored.num_bytes, done.stored.digest), each.buffer_start)
            for done, each in zip(written, self._objects, strict=True)
        ]
        return self._sealed(placed, small, len(memory))

    def _sealed(self, placed: list[Placed], small: SmallObjects, end: int) -> Taken:
        for key, data in small.created.items():
            placed.append(Placed(ObjectRef(key, len(data), xxh3(data)), end))
            end += os.pwrite(self.memory.fd, data, end)
        return Taken(self.memory.fd, end, tuple(placed))

    def close(self) -> None:
        """For who uses the memory for nothing more: call it when the result is there or failed."""
        self.memory.close()


class _Unstored(SmallObjects):
    """Tensor objects stay where they are; small ones are kept."""

    def __init__(self, small: SmallObjects) -> None:
        self.created = small.created

    def create(self, key: str, data: BytesLike) -> None:
        if not isinstance(data, memoryview):
            super().create(key, data)


def _of(planned: PlannedObject, memory: memoryview) -> memoryview:
    return memory[planned.buffer_start : planned.buffer_start + planned.num_bytes]
