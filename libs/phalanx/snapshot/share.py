"""Creates what one rank, or one import, stores of a checkpoint: its objects, hashed while they are written, then the
part object that lists them. All who write a checkpoint do it through this.

An object comes from one run of memory, or as a stream of pieces. Every key is created once; one that is there already
is compared: after a lost reply, or an earlier start, it is our own, with our bytes. Killed anywhere this leaves objects
that no manifest names.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from phalanx.core.digest import BytesLike, xxh3
from phalanx.core.errors import OutsideError
from phalanx.lineage import ObjectRef, keys
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore
from phalanx.objects.base import ObjectWriter
from phalanx.snapshot import background
from phalanx.snapshot.grouping import PlannedObject
from phalanx.snapshot.parts import CHUNK_BYTES, Part, StoredBox, StoredObject, part_bytes

NUM_WRITERS = 2  # while one waits for its fsync or its reply, the other is written
_READ_BYTES = 8 * CHUNK_BYTES


class OtherContent(OutsideError):
    """An object is there that we would have written with other bytes."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"{key} exists with other content: two processes write as the same rank of one attempt")


@dataclass(frozen=True, slots=True)
class Written:
    """An object as its part lists it, and the boxes in it."""

    stored: StoredObject
    boxes: tuple[StoredBox, ...] = ()


class Deadline:
    """Until when the save of `step` must be done: `deadline_s` from now."""

    def __init__(self, step: int, deadline_s: float) -> None:
        self._step, self._deadline_s, self._end = step, deadline_s, time.monotonic() + deadline_s

    def check(self) -> None:
        """Raises OutsideError past it."""
        if time.monotonic() > self._end:
            raise OutsideError(f"saving step {self._step} took longer than its deadline of {self._deadline_s:g} s")


def _never() -> None:
    """The check of those who have no deadline."""


class Share:
    """What the part `head`, given without its lists, is about to list. check: called before each write and read;
    raising ends the work.
    """

    def __init__(self, store: ObjectStore, head: Part, check: Callable[[], None] = _never) -> None:
        self._store, self._head, self._check = store, head, check

    def key(self, number: int) -> str:
        """Of tensor object `number`."""
        return keys.tensors(self._head.ref, keys.number(self._head.rank), number)

    def from_memory(self, number: int, planned: PlannedObject, data: memoryview) -> Written:
        """Creates object `number`, header included, straight from `data`: the store takes it whole or not at all, while
        another thread hashes it. Raises OtherContent, and what the store raises.
        """
        key = self.key(number)
        self._check()
        hashed = background.begin(lambda: _hashed(key, planned, data), "snapshot-hash")
        try:
            self._store.create(key, data)
        except ObjectExists:
            self._require_ours(hashed.result().stored)
        return hashed.result()

    def from_pieces(self, number: int, planned: PlannedObject, pieces: Iterable[memoryview]) -> Written:
        """Creates object `number` from the bytes of its boxes in order, in pieces of any length, each hashed as it is
        written. Raises as `from_memory`.
        """
        key = self.key(number)
        digests = Digests(key, planned)
        with self._writer(key) as writer:
            writer.write(planned.header)
            for piece in pieces:
                self._check()
                digests.add(piece)
                writer.write(piece)
            written = digests.finished()
            try:
                writer.commit()
            except ObjectExists:
                self._require_ours(written.stored)
        return written

    def put(self, key: str, data: bytes) -> Written:
        """Creates a small object that holds no boxes. Raises as `from_memory`."""
        self._check()
        try:
            self._store.create(key, data)
        except ObjectExists:
            if self._store.read(key) != data:
                raise OtherContent(key) from None
        return Written(StoredObject(key, len(data), xxh3(data), 0))

    def finish(self, written: Sequence[Written], records: Sequence[ObjectRef] = ()) -> ObjectRef:
        """Creates the part object, now that all it lists is stored. Raises as `from_memory`."""
        objects = tuple(each.stored for each in written)
        boxes = tuple(box for each in written for box in each.boxes)
        part = dataclasses.replace(self._head, objects=objects, boxes=boxes, records=tuple(records))
        stored = self.put(keys.part(part.ref, part.rank), part_bytes(part)).stored
        return ObjectRef(stored.key, stored.num_bytes, stored.digest)

    def _writer(self, key: str) -> ObjectWriter:
        """What takes the object's bytes; nothing is written of one that is there."""
        self._check()
        try:
            self._store.info(key)
        except ObjectMissing:
            with suppress(ObjectExists):
                return self._store.writer(key)
        return _Unwritten(key)

    def _require_ours(self, stored: StoredObject) -> None:
        digest = xxhash.xxh3_128()
        if self._store.info(stored.key).num_bytes == stored.num_bytes:
            for start in range(0, stored.num_bytes, _READ_BYTES):
                self._check()
                digest.update(self._store.read(stored.key, start, min(_READ_BYTES, stored.num_bytes - start)))
        if f"xxh3:{digest.hexdigest()}" != stored.digest:
            raise OtherContent(stored.key)


class _Unwritten(ObjectWriter):
    """For an object that is there already."""

    def __init__(self, key: str) -> None:
        self._key = key

    def write(self, chunk: BytesLike) -> None:
        pass

    def commit(self) -> None:
        raise ObjectExists(self._key)

    def abort(self) -> None:
        pass


class Digests:
    """Digests of one object and of every chunk of its boxes, from the bytes of the boxes as they come."""

    def __init__(self, key: str, planned: PlannedObject) -> None:
        self._key, self._planned = key, planned
        self._all = xxhash.xxh3_128(planned.header)
        self._chunks: list[list[str]] = [[] for _ in planned.boxes]
        self._spans = _spans(planned)
        self._box, self._left = next(self._spans, (0, 0))
        self._chunk = xxhash.xxh3_64()

    def add(self, piece: memoryview) -> None:
        """Takes the bytes that come next, in a piece of any length."""
        while len(piece):
            taken = piece[: self._left]
            assert len(taken), f"{self._key}: more bytes than its boxes have"
            self._all.update(taken)
            self._chunk.update(taken)
            self._left -= len(taken)
            piece = piece[len(taken) :]
            if self._left == 0:
                self._chunks[self._box].append(self._chunk.hexdigest())
                self._chunk.reset()
                self._box, self._left = next(self._spans, (0, 0))

    def finished(self) -> Written:
        """The object and its boxes, once all bytes have come."""
        assert self._left == 0, f"{self._key}: bytes of its boxes are missing"
        planned = self._planned
        boxes = (
            StoredBox(box.tensor, box.dtype, box.global_shape, box.box, self._key, start, CHUNK_BYTES, tuple(chunks))
            for (box, start), chunks in zip(planned.boxes, self._chunks, strict=True)
        )
        digest = f"xxh3:{self._all.hexdigest()}"
        return Written(StoredObject(self._key, planned.num_bytes, digest, len(planned.header)), tuple(boxes))


def _spans(planned: PlannedObject) -> Iterator[tuple[int, int]]:
    """Every chunk of the object in order of bytes: number of its box, its bytes."""
    for number, (box, _) in enumerate(planned.boxes):
        for start in range(0, box.num_bytes, CHUNK_BYTES):
            yield number, min(CHUNK_BYTES, box.num_bytes - start)


def _hashed(key: str, planned: PlannedObject, data: memoryview) -> Written:
    digests = Digests(key, planned)
    digests.add(data[len(planned.header) :])
    return digests.finished()
