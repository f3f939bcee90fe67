"""What the parts of a checkpoint hold together, gathered part by part as columns of numbers: a million boxes take tens
of megabytes, where as many objects of Python would take gigabytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from phalanx.core.box import Box
from phalanx.snapshot.coverage import coverage_fault, tiles
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.parts import Part


@dataclass(slots=True)
class BoxTable:
    """The stored boxes of one tensor. parts: number of the part of each. first_key: an object that holds one."""

    dtype: str
    global_shape: tuple[int, ...]
    first_key: str
    parts: array[int] = field(default_factory=lambda: array("l"))
    numbers: array[int] = field(default_factory=lambda: array("q"))

    @property
    def num_boxes(self) -> int:
        """How many there are."""
        return len(self.parts)

    def add(self, part: int, box: Box) -> None:
        """One box more."""
        self.parts.append(part)
        self.numbers.extend(box.offset)
        self.numbers.extend(box.shape)

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and shapes, each int64 [boxes, dims]."""
        num_dims = len(self.global_shape)
        both = np.array(self.numbers, dtype=np.int64).reshape(self.num_boxes, 2, num_dims)
        return both[:, 0], both[:, 1]

    def fault(self) -> str | None:
        """What keeps the boxes from tiling the tensor exactly once, in words; None where nothing does."""
        offsets, shapes = self.columns()
        if tiles(self.global_shape, offsets, shapes):
            return None
        boxes = [Box(tuple(a), tuple(n)) for a, n in zip(offsets.tolist(), shapes.tolist(), strict=True)]
        return coverage_fault(self.global_shape, boxes)


class Tally:
    """Boxes by tensor."""

    def __init__(self) -> None:
        self._tables: dict[str, BoxTable] = {}

    @property
    def tables(self) -> Mapping[str, BoxTable]:
        """All tensors by name."""
        return self._tables

    def add(self, part: Part) -> None:
        """Takes in a part; DamagedCheckpoint where it disagrees with an earlier one on a tensor's type or shape."""
        for box in part.boxes:
            table = self._tables.get(box.tensor)
            if table is None:
                table = self._tables[box.tensor] = BoxTable(box.dtype, box.global_shape, box.key)
            elif (table.dtype, table.global_shape) != (box.dtype, box.global_shape):
                what = f"has {box.dtype} {list(box.global_shape)}, unlike {table.first_key}"
                raise DamagedCheckpoint(box.key, what, tensor=box.tensor)
            table.add(part.rank, box.box)
