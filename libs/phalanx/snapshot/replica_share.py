"""One rank's share of a step in memory that its agent can take over: captured like a save, created nowhere.

The memory is an anonymous file (memfd): the agent maps the very pages, so no byte is copied on the way, and they live
for as long as anybody holds them. Killed anywhere: what no agent has mapped goes with the process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from phalanx.core.box import HeldTensor
from phalanx.core.digest import BytesLike, xxh3
from phalanx.lineage import ObjectRef
from phalanx.objects import ObjectExists, ObjectInfo, ObjectMissing, ObjectStore, StoreError
from phalanx.objects.base import ObjectWriter
from phalanx.snapshot import background
from phalanx.snapshot.capture import HostBuffer
from phalanx.snapshot.grouping import PlannedObject, plan_objects
from phalanx.snapshot.parts import Part
from phalanx.snapshot.replicas import Placed
from phalanx.snapshot.share import Share
from phalanx.snapshot.writer import owned_boxes

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


class ReplicaCapture:
    """A share that is being taken. `captured` is done once the tensors may change; `result` once all of it lies in
    memory, hashed. `close` lets the memory go: whoever has mapped it keeps it.

    head: of the part object. records: stores the step records in the store that it is given.
    """

    def __init__(self, head: Part, tensors: Sequence[HeldTensor], records: Records) -> None:
        owned, sources = owned_boxes(tensors)
        self._objects = plan_objects(owned)
        self._head, self._records = head, records
        self._fd = os.memfd_create(f"phalanx-step-{head.step}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.captured = HostBuffer(self._mapped).capture(self._objects, sources)
        self.result: Future[Taken] = background.begin(self._take, "replica-take")

    def _mapped(self, num_bytes: int) -> torch.Tensor:
        os.ftruncate(self._fd, max(1, num_bytes))
        return torch.frombuffer(mmap.mmap(self._fd, max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]

    def _take(self) -> Taken:
        memory = self.captured.result()
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
            end += os.pwrite(self._fd, data, end)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return Taken(self._fd, end, tuple(placed))

    def close(self) -> None:
        """Call it once, when the result is there or failed."""
        os.close(self._fd)


class _Unstored(SmallObjects):
    """Tensor objects stay where they are; small ones are kept."""

    def __init__(self, small: SmallObjects) -> None:
        self.created = small.created

    def create(self, key: str, data: BytesLike) -> None:
        if not isinstance(data, memoryview):
            super().create(key, data)


def _of(planned: PlannedObject, memory: memoryview) -> memoryview:
    return memory[planned.buffer_start : planned.buffer_start + planned.num_bytes]
