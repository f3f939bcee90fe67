"""A box: the rectangular part of a global tensor that one holder has, by offsets and shape; the common word of layout
and checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """What one rank holds of one global tensor.

    name: canonical, with global layer index, never a stage, chunk, rank or wrapper name.
    local: a plain tensor of the box's shape that aliases the live storage (writing to it writes the model or the
    optimizer state).
    replica: which of `num_replicas` holders of the very same box this rank is.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    replica: int = 0
    num_replicas: int = 1
