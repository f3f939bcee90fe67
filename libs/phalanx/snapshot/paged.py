"""Tensors whose values lie in a file: streamed from it into objects, and filled from a checkpoint, a part at a time, so
that no more than a part of them is ever in memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from phalanx.core.box import Box, HeldTensor, PagedTensor, Pages
from phalanx.snapshot.capture import owned_boxes
from phalanx.snapshot.grouping import OwnedBox, PlannedObject, plan_objects
from phalanx.snapshot.share import Share, Written
from phalanx.snapshot.slabs import row_boxes

# Stored values are verified in chunks of 1 MiB: parts that are not much larger would have many read twice. Of larger
# ones than the upper bound a restore would only hold more.
MIN_PART_BYTES: Final = 4 << 20
MAX_PART_BYTES: Final = 64 << 20


class PagedObjects:
    """The objects to be of what this rank owns of paged `tensors`, whose values of now are pinned until `release`."""

    def __init__(self, tensors: Sequence[HeldTensor], object_bytes: int) -> None:
        self._paged: list[tuple[HeldTensor, PagedTensor]] = []
        owned: list[OwnedBox] = []
        for held in tensors:
            assert held.paged is not None, f"{held.name} lies in memory"
            for box in owned_boxes([held])[0]:
                owned.append(dataclasses.replace(box, index=len(self._paged)))
                self._paged.append((held, held.paged))
        self._objects = plan_objects(owned, object_bytes)
        self._files: dict[int, Pages] = {id(paged.pages): paged.pages for _, paged in self._paged}
        for pages in self._files.values():
            pages.pin()

    def __len__(self) -> int:
        """Objects."""
        return len(self._objects)

    def create(self, share: Share, number: int, at: int) -> Written:
        """Stores object `at` of these as number `number` of the rank's. Raises as `Share.from_pieces`, and what the
        file raises.
        """
        planned = self._objects[at]
        return share.from_pieces(number, planned, self._pieces(planned))

    def _pieces(self, planned: PlannedObject) -> Iterator[memoryview]:
        for owned, _ in planned.boxes:
            held, paged = self._paged[owned.index]
            start = first_element(held.box, owned.box)
            yield from paged.pieces(start, start + owned.box.num_elements)

    def release(self) -> None:
        """Lets the pinned values go."""
        for pages in self._files.values():
            pages.release()


def first_element(outer: Box, inner: Box) -> int:
    """Number, in row-major order of `outer`, of the first element of `inner`, whose elements lie side by side there."""
    number = 0
    for offset, first, size in zip(inner.offset, outer.offset, outer.shape, strict=True):
        number = number * size + offset - first
    return number


def parts_of(tensors: Sequence[HeldTensor]) -> Iterator[list[PagedPart]]:
    """All values of paged tensors in parts that are small enough to be in memory together, in order of bytes.

    A part is as large as what must be read for it: of a column of a matrix the whole rows, whose chunks hold it.
    """
    batch: list[PagedPart] = []
    filled_bytes = 0.0
    for held in tensors:
        assert held.paged is not None, f"{held.name} lies in memory"
        most_bytes = min(max(MIN_PART_BYTES, held.paged.pages.part_bytes), MAX_PART_BYTES)
        read_bytes = _read_bytes(held)
        for box in row_boxes(held.box.shape, int(most_bytes / read_bytes)):
            num_bytes = box.num_elements * read_bytes
            if batch and filled_bytes + num_bytes > most_bytes:
                yield batch
                batch, filled_bytes = [], 0.0
            batch.append(PagedPart(held, held.paged, box))
            filled_bytes += num_bytes
    if batch:
        yield batch


def _read_bytes(held: HeldTensor) -> float:
    """Of a whole row for each element of it that is held."""
    row, of_whole = math.prod(held.box.shape[1:]), math.prod(held.global_shape[1:])
    return held.local.element_size() * of_whole / max(row, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class PagedPart:
    """Elements of a paged tensor that lie side by side. box: within the tensor's own."""

    held: HeldTensor
    paged: PagedTensor
    box: Box

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return self.box.num_elements * self.held.local.element_size()

    def in_memory(self, memory: torch.Tensor) -> HeldTensor:
        """A tensor for the values in `memory`, uint8 [num_bytes], with what lies there."""
        offset = tuple(map(sum, zip(self.held.box.offset, self.box.offset, strict=True)))
        local = memory.view(self.held.local.dtype).view(self.box.shape)
        return dataclasses.replace(self.held, box=Box(offset, self.box.shape), local=local, paged=None)

    def write(self, values: torch.Tensor) -> None:
        """Puts them into the file."""
        self.paged.write(first_element(Box((0,) * len(self.box.shape), self.held.box.shape), self.box), values)
