"""Saves what one rank owns of a checkpoint: capture now, upload in the background, the part object last.

`save` returns when every byte is in the host buffer; `begin` returns at once, and the tensors must stay as they are
until `wait_captured` of what it gives. The upload creates its objects from that buffer (create-only, whole or absent),
hashing while they are written, and only then the part object that lists them. A rank killed anywhere leaves objects
that no manifest names. A failed upload is raised by `wait`, or by the next save where nobody waited.

Tensors whose values lie in a file are not captured: they are pinned there and stream into objects of their own, behind
the others, in pieces of a few MiB. They may change at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TypeVar

from phalanx.core.box import HeldTensor
from phalanx.core.errors import OutsideError
from phalanx.lineage import ObjectRef
from phalanx.objects import ObjectStore
from phalanx.snapshot import background
from phalanx.snapshot.capture import HostBuffer, owned_boxes
from phalanx.snapshot.grouping import OBJECT_BYTES, PlannedObject, plan_objects
from phalanx.snapshot.paged import PagedObjects
from phalanx.snapshot.parts import Part
from phalanx.snapshot.share import NUM_WRITERS, Deadline, Share, Written

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class Figures:
    """What a save cost: seconds until the tensors were copied, from then until the part object was stored, and bytes of
    the rank's tensor objects.
    """

    capture_s: float
    upload_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The part object that a save ended with, and what it cost."""

    part: ObjectRef
    figures: Figures


class PendingSave:
    """A save that goes on: first its tensors are captured, then they are uploaded."""

    def __init__(self, attempt: int, step: int, captured: Future[memoryview], stored: Future[Stored]) -> None:
        self.attempt, self.step = attempt, step
        self.captured, self.result = captured, stored
        self.seen = False

    def done(self) -> bool:
        """True when the upload has ended, well or badly."""
        return self.result.done()

    def wait_captured(self, deadline_s: float) -> None:
        """Returns when the tensors are copied and may change. Raises what the copy failed with, or OutsideError past
        the deadline.
        """
        self._outcome(self.captured, deadline_s, "capturing")

    def wait(self, deadline_s: float) -> ObjectRef:
        """The part object, once it is stored. Raises what the upload failed with, or OutsideError past the deadline."""
        part = self._outcome(self.result, deadline_s, "saving").part
        self.seen = True
        return part

    @property
    def figures(self) -> Figures:
        """What the save cost; only of one that `wait` returned from."""
        return self.result.result(timeout=0).figures

    def _outcome(self, future: Future[Outcome], deadline_s: float, doing: str) -> Outcome:
        try:
            return future.result(timeout=deadline_s)
        except FutureTimeout as error:
            if future.done():
                self.seen = True
                raise
            raise OutsideError(f"{doing} step {self.step} was not done within {deadline_s:g} s") from error
        except Exception:
            self.seen = True
            raise


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

    def prepare(self, tensors: Sequence[HeldTensor]) -> Future[None]:
        """Gets the host memory that a save of `tensors` needs, in the background, so that the first one does not wait
        for it. A save that finds it unfinished, or failed, sees to its memory itself.
        """
        owned, sources = owned_boxes([held for held in tensors if held.paged is None])
        return self._buffer.prepare(plan_objects(owned, self._object_bytes), sources)

    def save(
        self,
        attempt: int,
        step: int,
        tensors: Sequence[HeldTensor],
        records: Callable[[], tuple[ObjectRef, ...]] = tuple,
    ) -> PendingSave:
        """As `begin`; returns when the values of now are copied, so that the tensors may change."""
        pending = self.begin(attempt, step, tensors, records)
        pending.wait_captured(self._deadline_s)
        return pending

    def begin(
        self,
        attempt: int,
        step: int,
        tensors: Sequence[HeldTensor],
        records: Callable[[], tuple[ObjectRef, ...]] = tuple,
    ) -> PendingSave:
        """Begins to capture `tensors` and to upload those boxes that this rank owns. They must not change before
        `wait_captured` of the result has returned. Tensor names must not repeat a box.

        records: called in the background before the part object is written; it stores this rank's step records and
        returns them, and the part hands them on to the manifest.
        Waits for the save before it, if that is still in flight, and raises its failure if nobody has seen it; after
        that, saving works again.
        """
        self.finish(self._deadline_s)
        owned, sources = owned_boxes([held for held in tensors if held.paged is None])
        objects = plan_objects(owned, self._object_bytes)
        paged = PagedObjects([held for held in tensors if held.paged is not None], self._object_bytes)
        captured = self._buffer.capture(objects, sources)
        head = Part(attempt, step, self._rank, self._world_size, (), ())
        upload = _Upload(self._store, head, objects, paged, captured, records, self._deadline_s)
        self._last = PendingSave(attempt, step, captured, background.begin(upload.run, "snapshot-upload"))
        return self._last

    def finish(self, deadline_s: float) -> None:
        """Waits for the save in flight, if any; raises its failure unless a `wait` has."""
        last = self._last
        if last is not None and not (last.done() and last.seen):
            last.wait(deadline_s)


class _Upload:
    """One rank's upload of one checkpoint, from captured memory."""

    def __init__(
        self,
        store: ObjectStore,
        part: Part,
        objects: Sequence[PlannedObject],
        paged: PagedObjects,
        captured: Future[memoryview],
        records: Callable[[], tuple[ObjectRef, ...]],
        deadline_s: float,
    ) -> None:
        self._objects, self._paged, self._captured, self._records = objects, paged, captured, records
        self._share = Share(store, part, Deadline(part.step, deadline_s).check)
        self._began = time.monotonic()

    def run(self) -> Stored:
        """Creates all objects, then the part object. What was pinned is let go of, however it ends."""
        try:
            return self._run()
        finally:
            self._paged.release()

    def _run(self) -> Stored:
        memory = self._captured.result()
        captured = time.monotonic()

        def create(number: int) -> Written:
            if number >= len(self._objects):
                return self._paged.create(self._share, number, number - len(self._objects))
            planned = self._objects[number]
            data = memory[planned.buffer_start : planned.buffer_start + planned.num_bytes]
            return self._share.from_memory(number, planned, data)

        written = background.each(create, len(self._objects) + len(self._paged), NUM_WRITERS, "snapshot-write")
        part = self._share.finish(written, self._records())
        num_bytes = sum(each.stored.num_bytes for each in written)
        return Stored(part, Figures(captured - self._began, time.monotonic() - captured, num_bytes))
