"""Saves what one rank owns of a checkpoint: capture now, upload in a background thread, the part object last.

`save` returns when every byte is in the host buffer, so that the next optimizer step may change the tensors. The upload
creates its objects one by one (create-only, whole or absent), hashing while writing, and only then the part object that
lists them. A rank killed anywhere leaves objects that no manifest names. A failed upload is raised by `wait`, or by the
next `save` where nobody waited.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import torch
import xxhash

from phalanx.core.box import HeldTensor
from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, ObjectRef, keys
from phalanx.objects import ObjectExists, ObjectStore
from phalanx.snapshot.capture import HostBuffer, cut
from phalanx.snapshot.dtypes import DTYPES
from phalanx.snapshot.grouping import OBJECT_BYTES, OwnedBox, PlannedObject, plan_objects
from phalanx.snapshot.owners import owned_box
from phalanx.snapshot.parts import CHUNK_BYTES, Part, StoredBox, StoredObject, part_bytes

_LOG = logging.getLogger(__name__)
_WRITE_BYTES = 8 * CHUNK_BYTES


class PendingSave:
    """A save whose tensors are captured and whose upload goes on."""

    def __init__(self, attempt: int, step: int) -> None:
        self.attempt, self.step = attempt, step
        self.result: Future[ObjectRef] = Future()
        self.seen = False

    def done(self) -> bool:
        """True when the upload has ended, well or badly."""
        return self.result.done()

    def wait(self, deadline_s: float) -> ObjectRef:
        """The part object, once it is stored. Raises what the upload failed with, or OutsideError past the deadline."""
        try:
            part = self.result.result(timeout=deadline_s)
        except FutureTimeout as error:
            if self.result.done():
                self.seen = True
                raise
            raise OutsideError(f"saving step {self.step} was not done within {deadline_s:g} s") from error
        except Exception:
            self.seen = True
            raise
        self.seen = True
        return part


class Writer:
    """Writes this rank's share of checkpoints. One save is in flight at most.

    store: rooted at the job. deadline_s: within which an upload must end. object_bytes: size that an object stays below
    (boxes aren't cut).
    """

    def __init__(
        self,
        store: ObjectStore,
        rank: int,
        world_size: int,
        *,
        deadline_s: float = 600,
        object_bytes: int = OBJECT_BYTES,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._deadline_s, self._object_bytes = deadline_s, object_bytes
        self._buffer = HostBuffer()
        self._last: PendingSave | None = None

    def save(
        self,
        attempt: int,
        step: int,
        tensors: Sequence[HeldTensor],
        records: Callable[[], tuple[ObjectRef, ...]] = tuple,
    ) -> PendingSave:
        """Captures `tensors` and starts the upload of those boxes that this rank owns. Tensor names must not repeat a
        box.

        records: called in the background before the part object is written; it stores this rank's step records and
        returns them, and the part hands them on to the manifest.
        Waits for the save before it, if that is still in flight, and raises its failure if nobody has seen it; after
        that, saving works again.
        """
        self.finish(self._deadline_s)
        owned, sources = _owned(tensors)
        objects = plan_objects(owned, self._object_bytes)
        memory = self._buffer.capture(objects, sources)
        pending = PendingSave(attempt, step)
        head = Part(attempt, step, self._rank, self._world_size, (), ())
        upload = _Upload(self._store, head, objects, memory, records, self._deadline_s)
        threading.Thread(target=_settle, args=(pending.result, upload.run), name="snapshot-upload", daemon=True).start()
        self._last = pending
        return pending

    def finish(self, deadline_s: float) -> None:
        """Waits for the save in flight, if any; raises its failure unless a `wait` has."""
        last = self._last
        if last is not None and not (last.done() and last.seen):
            last.wait(deadline_s)


def _settle(result: Future[ObjectRef], work: Callable[[], ObjectRef]) -> None:
    """Runs `work` and hands on what comes of it, whatever it is: the thread's owner raises it."""
    try:
        result.set_result(work())
    except BaseException as error:  # noqa: BLE001  (re-raised by wait)
        _LOG.warning("saving a checkpoint failed: %s", error)
        result.set_exception(error)


def _owned(tensors: Sequence[HeldTensor]) -> tuple[list[OwnedBox], list[torch.Tensor]]:
    """The boxes that this rank writes, and the views of the live tensors that hold them.

    An empty box is written only for a tensor that has no elements at all, so that its name and type are not lost.
    """
    owned: list[OwnedBox] = []
    sources: list[torch.Tensor] = []
    for held in tensors:
        dtype = str(held.local.dtype).removeprefix("torch.")
        assert dtype in DTYPES, f"{held.name}: a checkpoint cannot hold {held.local.dtype}"
        assert tuple(held.local.shape) == held.box.shape, (
            f"{held.name}: {tuple(held.local.shape)} is not its {held.box}"
        )
        box = owned_box(held.name, held.box, DTYPES[dtype].itemsize, held.replica, held.num_replicas)
        if box is not None and (box.num_elements > 0 or 0 in held.global_shape):
            owned.append(OwnedBox(held.name, dtype, held.global_shape, box, len(sources)))
            sources.append(cut(held.local, held.box, box))
    return owned, sources


class _Upload:
    """One rank's upload of one checkpoint, from captured memory."""

    def __init__(
        self,
        store: ObjectStore,
        part: Part,
        objects: Sequence[PlannedObject],
        memory: memoryview,
        records: Callable[[], tuple[ObjectRef, ...]],
        deadline_s: float,
    ) -> None:
        self._store, self._part, self._objects, self._memory, self._records = store, part, objects, memory, records
        self._end = time.monotonic() + deadline_s
        self._deadline_s = deadline_s

    def run(self) -> ObjectRef:
        """Creates all objects, then the part object; returns the latter."""
        head, stored, boxes = self._part, [], []
        ref = CheckpointRef(head.attempt, head.step)
        for number, planned in enumerate(self._objects):
            key = keys.tensors(ref, keys.number(head.rank), number)
            stored.append(self._create(key, planned))
            boxes += [self._stored_box(key, planned, box, start) for box, start in planned.boxes]
        records = self._records()
        part = dataclasses.replace(head, objects=tuple(stored), boxes=tuple(boxes), records=records)
        key, data = keys.part(ref, part.rank), part_bytes(part)
        self._check_time()
        try:
            self._store.create(key, data)
        except ObjectExists:
            if self._store.read(key) != data:
                raise OutsideError(
                    f"{key} exists with other content: two processes write as the same rank of one attempt"
                ) from None
        return ObjectRef(key, len(data), xxh3(data))

    def _create(self, key: str, planned: PlannedObject) -> StoredObject:
        data = self._memory[planned.buffer_start : planned.buffer_start + planned.data_bytes]
        digest = xxhash.xxh3_128()
        num_bytes = len(planned.header) + planned.data_bytes
        try:
            with self._store.writer(key) as writer:
                digest.update(planned.header)
                writer.write(planned.header)
                for start in range(0, len(data), _WRITE_BYTES):
                    self._check_time()
                    piece = data[start : start + _WRITE_BYTES]
                    digest.update(piece)
                    writer.write(piece)
                writer.commit()
        except ObjectExists:
            self._check_own(key, planned.header, data)
            digest = xxhash.xxh3_128(planned.header)
            digest.update(data)
        return StoredObject(key, num_bytes, f"xxh3:{digest.hexdigest()}", len(planned.header))

    def _check_own(self, key: str, header: bytes, data: memoryview) -> None:
        """The object is there already: after a lost reply it is our own, with our bytes; otherwise somebody else writes
        as we do.
        """
        same = (
            self._store.info(key).num_bytes == len(header) + len(data)
            and self._store.read(key, 0, len(header)) == header
        )
        for start in range(0, len(data) if same else 0, _WRITE_BYTES):
            self._check_time()
            piece = data[start : start + _WRITE_BYTES]
            same = same and self._store.read(key, len(header) + start, len(piece)) == piece
        if not same:
            raise OutsideError(f"{key} exists with other content: two processes write as the same rank of one attempt")

    def _stored_box(self, key: str, planned: PlannedObject, box: OwnedBox, start: int) -> StoredBox:
        first = planned.buffer_start + start
        data = self._memory[first : first + box.num_bytes]
        chunks = tuple(xxhash.xxh3_64_hexdigest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))
        return StoredBox(box.tensor, box.dtype, box.global_shape, box.box, key, start, CHUNK_BYTES, chunks)

    def _check_time(self) -> None:
        if time.monotonic() > self._end:
            raise OutsideError(f"saving step {self._part.step} took longer than its deadline of {self._deadline_s:g} s")
