"""Writes one rank's share of a checkpoint from the tensors themselves: objects, then the values, the part object last.

Unlike `phalanx.snapshot.writer` it copies nothing first: the tensors are those of a blocking save, or were staged by
`dcp.async_save` already. Every object is created once; killed anywhere it leaves objects that no manifest names.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash

from phalanx.core.digest import BytesLike, xxh3
from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, ObjectRef, keys
from phalanx.objects import ObjectExists, ObjectStore
from phalanx.snapshot.dcp.values import SUFFIX
from phalanx.snapshot.grouping import OwnedBox, PlannedObject, plan_objects
from phalanx.snapshot.parts import CHUNK_BYTES, Part, StoredBox, StoredObject, part_bytes

_NUM_WRITERS = 2  # while one waits for its fsync, the other hashes


@dataclass(frozen=True, slots=True)
class Source:
    """A box that this rank writes, and the tensor (of the box's shape, on any device, in any strides) that holds it."""

    box: OwnedBox
    tensor: torch.Tensor


class Upload:
    """One rank's upload. head: the part without its lists. values: content of the values object, None for none."""

    def __init__(
        self, store: ObjectStore, head: Part, sources: Sequence[Source], values: bytes | None, deadline_s: float
    ) -> None:
        self._store, self._head, self._values = store, head, values
        self._tensors = {source.box.index: source.tensor for source in sources}
        self._objects = plan_objects([source.box for source in sources])
        self._deadline_s, self._end = deadline_s, time.monotonic() + deadline_s
        self._ref = CheckpointRef(head.attempt, head.step)

    def run(self) -> ObjectRef:
        """Creates all objects, then the part object; returns the latter. Raises what the store raises, OutsideError
        past the deadline and where another process writes as this rank.
        """
        with ThreadPoolExecutor(_NUM_WRITERS) as pool:
            tasks = [pool.submit(self._create, number, planned) for number, planned in enumerate(self._objects)]
            try:
                done = [task.result() for task in tasks]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        objects = [stored for stored, _ in done] + ([] if self._values is None else [self._put_values(self._values)])
        boxes = tuple(box for _, boxes in done for box in boxes)
        part = dataclasses.replace(self._head, objects=tuple(objects), boxes=boxes)
        key, data = keys.part(self._ref, part.rank), part_bytes(part)
        self._put(key, data)
        return ObjectRef(key, len(data), xxh3(data))

    def _put_values(self, data: bytes) -> StoredObject:
        key = f"{keys.objects(self._ref)}{keys.number(self._head.rank)}{SUFFIX}"
        self._put(key, data)
        return StoredObject(key, len(data), xxh3(data), 0)

    def _put(self, key: str, data: bytes) -> None:
        self._check_time()
        try:
            self._store.create(key, data)
        except ObjectExists:
            if self._store.read(key) != data:
                raise _not_ours(key) from None

    def _create(self, number: int, planned: PlannedObject) -> tuple[StoredObject, list[StoredBox]]:
        key = keys.tensors(self._ref, keys.number(self._head.rank), number)
        try:
            with self._store.writer(key) as writer:
                stored, boxes = self._stream(key, planned, writer.write)
                writer.commit()
        except ObjectExists:
            stored, boxes = self._stream(key, planned, lambda piece: None)
            self._check_own(stored)
        return stored, boxes

    def _stream(
        self, key: str, planned: PlannedObject, write: Callable[[BytesLike], None]
    ) -> tuple[StoredObject, list[StoredBox]]:
        """Hands all bytes of an object to `write`, hashing each chunk while it is in the processor's cache."""
        digest, boxes = xxhash.xxh3_128(planned.header), []
        write(planned.header)
        for box, start in planned.boxes:
            chunks = []
            for piece in self._pieces(box):
                digest.update(piece)
                chunks.append(xxhash.xxh3_64_hexdigest(piece))
                write(piece)
            boxes.append(
                StoredBox(box.tensor, box.dtype, box.global_shape, box.box, key, start, CHUNK_BYTES, tuple(chunks))
            )
        num_bytes = len(planned.header) + planned.data_bytes
        return StoredObject(key, num_bytes, f"xxh3:{digest.hexdigest()}", len(planned.header)), boxes

    def _pieces(self, box: OwnedBox) -> Iterator[memoryview]:
        """The box's bytes, row-major, in chunks; one box at a time is copied where its tensor is elsewhere or has other
        strides.
        """
        tensor = self._tensors[box.index].detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        assert len(data) == box.num_bytes, (box, tensor.shape, tensor.dtype)
        for start in range(0, len(data), CHUNK_BYTES):
            self._check_time()
            yield data[start : start + CHUNK_BYTES]

    def _check_own(self, stored: StoredObject) -> None:
        """The object is there already: after a lost reply it is our own, with our bytes; otherwise somebody else writes
        as we do.
        """
        digest = xxhash.xxh3_128()
        if self._store.info(stored.key).num_bytes == stored.num_bytes:
            for start in range(0, stored.num_bytes, CHUNK_BYTES):
                self._check_time()
                digest.update(self._store.read(stored.key, start, min(CHUNK_BYTES, stored.num_bytes - start)))
        if f"xxh3:{digest.hexdigest()}" != stored.digest:
            raise _not_ours(stored.key)

    def _check_time(self) -> None:
        if time.monotonic() > self._end:
            raise OutsideError(f"saving step {self._head.step} took longer than its deadline of {self._deadline_s:g} s")


def _not_ours(key: str) -> OutsideError:
    return OutsideError(f"{key} exists with other content: two processes write as the same rank of one attempt")
