"""Tensors of a checkpoint in the order of their bytes, a bounded piece at a time: for tools that hold no tensor whole.

A slab is a part of a tensor that is contiguous in row-major order. Several small tensors are read at once, so that a
store far away is asked in parallel; of a large one no more than a slab is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from phalanx.core.box import Box, whole
from phalanx.objects import ObjectStore
from phalanx.snapshot.fetch import Wanted, fetch
from phalanx.snapshot.index import Index, StoredTensor
from phalanx.snapshot.parts import StoredBox

MIN_BYTES: Final = 4 << 20
MAX_BYTES: Final = 64 << 20
_SHARE: Final = 4  # a slab is in memory up to three times: as it was read, as its box, and put together


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of a tensor whose elements lie side by side in row-major order."""

    tensor: StoredTensor
    box: Box

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.box.num_elements * self.tensor.kind.itemsize


def slab_bytes_for(tensors: Iterable[StoredTensor]) -> int:
    """The size of slabs with which reading needs less memory than the largest of `tensors`."""
    largest = max((Slab(tensor, whole(tensor.global_shape)).num_bytes for tensor in tensors), default=0)
    return min(MAX_BYTES, max(MIN_BYTES, largest // _SHARE))


def batches(tensors: Iterable[StoredTensor], slab_bytes: int) -> Iterator[list[Slab]]:
    """All of `tensors` as slabs, in order of tensors and of their bytes; up to `slab_bytes` of slabs at once, no tensor
    twice in a batch.
    """
    batch: list[Slab] = []
    filled_bytes = 0
    for tensor in tensors:
        for box in row_boxes(tensor.global_shape, slab_bytes // tensor.kind.itemsize):
            slab = Slab(tensor, box)
            if batch and (filled_bytes + slab.num_bytes > slab_bytes or batch[-1].tensor is tensor):
                yield batch
                batch, filled_bytes = [], 0
            batch.append(slab)
            filled_bytes += slab.num_bytes
    if batch:
        yield batch


def row_boxes(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Boxes of at most `max_elements` (at least one) that tile a tensor of `shape` in row-major order."""
    full = whole(shape)
    if full.num_elements <= max(1, max_elements):
        yield full
        return
    row = full.num_elements // shape[0]
    if row > max_elements:
        for at in range(shape[0]):
            for inner in row_boxes(shape[1:], max_elements):
                yield Box((at, *inner.offset), (1, *inner.shape))
        return
    rows = max(1, max_elements // row)
    for first in range(0, shape[0], rows):
        yield Box((first, *full.offset[1:]), (min(rows, shape[0] - first), *shape[1:]))


def read_slabs(store: ObjectStore, index: Index, batch: Sequence[Slab]) -> list[np.ndarray]:
    """The values of each slab, verified, in its box's shape; bfloat16 as its bytes in uint16. No tensor twice.

    Raises DamagedCheckpoint at the first wrong chunk.
    """
    found = [np.empty(slab.box.shape, dtype=slab.tensor.kind.storage) for slab in batch]
    wanted = [each for slab, values in zip(batch, found, strict=True) for each in _wanted(slab, values)]
    fetch(store, index.objects, wanted)
    return found


def _wanted(slab: Slab, values: np.ndarray) -> Iterator[Wanted]:
    for stored in slab.tensor.boxes:
        common = slab.box.intersect(stored.box)
        if common is not None:
            yield _fill(slab.box, values, stored, common)


def _fill(target: Box, values: np.ndarray, stored: StoredBox, common: Box) -> Wanted:
    def deliver(array: np.ndarray) -> None:
        values[target.slices_of(common)] = array[stored.box.slices_of(common)]

    return Wanted(stored, [common], deliver)
