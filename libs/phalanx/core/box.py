"""A box: the rectangular part of a global tensor that one holder has, by offsets and shape; the common word of layout
and checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Box:
    """Half-open rectangle [offset, offset + shape) in a tensor's global index space; rank 0 tensors have offset () and
    shape ().
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.offset) == len(self.shape) and all(n >= 0 for n in self.offset + self.shape), self

    @property
    def num_elements(self) -> int:
        """Elements in the box; 0 for an empty box, 1 for a rank 0 tensor."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The part that both have, or None where they share no element."""
        start = tuple(map(max, self.offset, other.offset))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def slices_of(self, inner: Box) -> tuple[slice, ...]:
        """Slices that cut `inner` (a box inside this one, in global indices) out of an array that holds this box."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(inner.offset, self.offset, inner.shape, strict=True))


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is the whole tensor of `shape`."""
    return Box((0,) * len(shape), shape)


class Pages(Protocol):
    """Values of many tensors in a file."""

    def pin(self) -> None:
        """Keeps the values of now for `PagedTensor.pieces`, until `release`."""

    def release(self) -> None:
        """Lets go of what `pin` keeps; without a pin nothing happens."""

    @property
    def part_bytes(self) -> int:
        """Bytes of memory in which a reader or a writer may put values together."""
        ...


class PagedTensor(Protocol):
    """The values of one tensor in a file, by number of element in row-major order of its box."""

    @property
    def pages(self) -> Pages:
        """Where they lie, beside those of other tensors."""
        ...

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes of elements [start, stop) as they were at `pages.pin()`, in order; each piece is valid until the next
        is asked for.
        """
        ...

    def write(self, start: int, values: torch.Tensor) -> None:
        """Puts `values`, row-major, from element `start` on; not while `pages` are pinned."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """What one rank holds of one global tensor.

    name: canonical, with global layer index, never a stage, chunk, rank or wrapper name.
    local: a plain tensor of the box's shape that aliases the live storage (writing to it writes the model or the
    optimizer state); of one whose values lie in a file it is on the meta device.
    replica: which of `num_replicas` holders of the very same box this rank is.
    paged: the values, where they lie in a file.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    replica: int = 0
    num_replicas: int = 1
    paged: PagedTensor | None = None
