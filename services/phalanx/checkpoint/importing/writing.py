"""Writes the objects and the part of an imported checkpoint, as one rank that holds everything would.

Each object is created once, streamed and hashed while it is read from the source. One that is there already is an
earlier start's: its bytes must be the source's, so it is compared, not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from phalanx.checkpoint.importing.mapping import MappedTensor
from phalanx.checkpoint.importing.values import DTYPE, READ_AHEAD, pieces
from phalanx.core.box import whole
from phalanx.core.digest import BytesLike
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore
from phalanx.snapshot.grouping import OwnedBox, PlannedObject, plan_objects
from phalanx.snapshot.parts import CHUNK_BYTES, Part, StoredBox, StoredObject, part_bytes

_READ_BYTES = 8 << 20


class Importer:
    """Writes `tensors` of the source store `source` as checkpoint `ref` of the job whose root `target` is. progress:
    hears of the bytes of tensors that are done.
    """

    def __init__(
        self,
        source: ObjectStore,
        target: ObjectStore,
        ref: CheckpointRef,
        tensors: Sequence[MappedTensor],
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._source, self._target, self._ref, self._tensors = source, target, ref, tensors
        self._progress = progress
        boxes = [OwnedBox(each.name, DTYPE, each.shape, whole(each.shape), n) for n, each in enumerate(tensors)]
        self._objects = plan_objects(boxes)

    def run(self) -> None:
        """Creates what is not there yet, the part last. Raises PhalanxError where another source's bytes are there,
        and what reading the source and writing the store raise.
        """
        with ThreadPoolExecutor(READ_AHEAD) as pool:
            done = [self._object(pool, number, planned) for number, planned in enumerate(self._objects)]
        objects = tuple(stored for stored, _ in done)
        boxes = tuple(box for _, boxes in done for box in boxes)
        part = Part(self._ref.attempt, self._ref.step, 0, 1, objects, boxes)
        Lineage(self._target).put(keys.part(self._ref, 0), part_bytes(part))

    def _object(
        self, pool: ThreadPoolExecutor, number: int, planned: PlannedObject
    ) -> tuple[StoredObject, list[StoredBox]]:
        key = keys.tensors(self._ref, keys.number(0), number)
        if self._is_there(key):
            stored, boxes = self._stream(pool, key, planned, lambda data: None)
            self._compare(stored)
            return stored, boxes
        with self._target.writer(key) as writer:
            stored, boxes = self._stream(pool, key, planned, writer.write)
            try:
                writer.commit()
            except ObjectExists:
                self._compare(stored)  # a lost reply, or another import of the same
        return stored, boxes

    def _stream(
        self, pool: ThreadPoolExecutor, key: str, planned: PlannedObject, write: Callable[[BytesLike], None]
    ) -> tuple[StoredObject, list[StoredBox]]:
        """Hands all bytes of an object to `write`, and hashes them."""
        digest, boxes = xxhash.xxh3_128(planned.header), []
        write(planned.header)
        for box, start in planned.boxes:
            chunks = _Chunks()
            for piece in pieces(self._source, self._tensors[box.index], pool):
                write(piece)
                digest.update(piece)
                chunks.add(piece)
                self._progress(len(piece))
            boxes.append(
                StoredBox(box.tensor, DTYPE, box.global_shape, box.box, key, start, CHUNK_BYTES, chunks.finished())
            )
        num_bytes = len(planned.header) + planned.data_bytes
        return StoredObject(key, num_bytes, f"xxh3:{digest.hexdigest()}", len(planned.header)), boxes

    def _is_there(self, key: str) -> bool:
        try:
            self._target.info(key)
        except ObjectMissing:
            return False
        return True

    def _compare(self, stored: StoredObject) -> None:
        digest = xxhash.xxh3_128()
        if self._target.info(stored.key).num_bytes == stored.num_bytes:
            for piece in self._stored_pieces(stored):
                digest.update(piece)
        if f"xxh3:{digest.hexdigest()}" != stored.digest:
            raise PhalanxError(
                f"{self._target.url}/{stored.key}",
                expected="what the source has: its values have changed since this import began",
                remedy="bring the source back as it was, or import it into a job of another [job] name",
            )

    def _stored_pieces(self, stored: StoredObject) -> Iterator[bytes]:
        for start in range(0, stored.num_bytes, _READ_BYTES):
            yield self._target.read(stored.key, start, min(_READ_BYTES, stored.num_bytes - start))


class _Chunks:
    """Digests of the chunks of a box whose bytes come in pieces of any length."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._hash, self._filled = xxhash.xxh3_64(), 0

    def add(self, piece: memoryview) -> None:
        while len(piece):
            taken = piece[: CHUNK_BYTES - self._filled]
            self._hash.update(taken)
            self._filled += len(taken)
            piece = piece[len(taken) :]
            if self._filled == CHUNK_BYTES:
                self._close()

    def finished(self) -> tuple[str, ...]:
        if self._filled:
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash, self._filled = xxhash.xxh3_64(), 0
