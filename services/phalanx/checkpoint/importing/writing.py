"""Writes the objects and the part of an imported checkpoint, as one rank that holds everything would.

Each object is created once, streamed and hashed while it is read from the source. One that is there already is an
earlier start's: its bytes must be the source's, so it is compared, not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from phalanx.checkpoint.importing.mapping import MappedTensor
from phalanx.checkpoint.importing.values import DTYPE, READ_AHEAD, pieces
from phalanx.core.box import whole
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef
from phalanx.objects import ObjectStore
from phalanx.snapshot.grouping import OwnedBox, PlannedObject, plan_objects
from phalanx.snapshot.parts import Part
from phalanx.snapshot.share import OtherContent, Share


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
        self._source, self._target, self._tensors, self._progress = source, target, tensors, progress
        boxes = [OwnedBox(each.name, DTYPE, each.shape, whole(each.shape), n) for n, each in enumerate(tensors)]
        self._objects = plan_objects(boxes)
        self._share = Share(target, Part(ref.attempt, ref.step, 0, 1, (), ()))

    def run(self) -> None:
        """Creates what is not there yet, the part last. Raises PhalanxError where another source's bytes are there,
        and what reading the source and writing the store raise.
        """
        try:
            with ThreadPoolExecutor(READ_AHEAD) as pool:
                written = [
                    self._share.from_pieces(number, planned, self._pieces(pool, planned))
                    for number, planned in enumerate(self._objects)
                ]
            self._share.finish(written)
        except OtherContent as error:
            raise PhalanxError(
                f"{self._target.url}/{error.key}",
                expected="what the source has: its values have changed since this import began",
                remedy="bring the source back as it was, or import it into a job of another [job] name",
            ) from error

    def _pieces(self, pool: ThreadPoolExecutor, planned: PlannedObject) -> Iterator[memoryview]:
        for box, _ in planned.boxes:
            for piece in pieces(self._source, self._tensors[box.index], pool):
                yield piece
                self._progress(len(piece))
