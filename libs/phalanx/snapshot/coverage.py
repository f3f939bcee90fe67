"""Do the stored boxes hold every element of every tensor exactly once? The question a commit must answer before a
checkpoint exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.core.box import Box, whole

_CELLS_A_BOX = 8


def tiles(global_shape: tuple[int, ...], offsets: np.ndarray, shapes: np.ndarray) -> bool:
    """True only where the boxes (int64 [n, dims], empty ones don't count) tile the tensor exactly once. False may also
    mean that it takes another way to tell: boxes so irregular that the grid of all their edges is much larger than n.

    Each box adds 1 to the cells of that grid that it covers, by differences at its corners and sums along each axis.
    """
    num_dims = len(global_shape)
    stops = offsets + shapes
    if num_dims == 0 or (offsets < 0).any() or (stops > np.array(global_shape, dtype=np.int64)).any():
        return False
    full = (shapes > 0).all(axis=1)
    offsets, stops = offsets[full], stops[full]
    edges = [
        np.unique(np.concatenate(([0, n], a, b))) for n, a, b in zip(global_shape, offsets.T, stops.T, strict=True)
    ]
    size = [len(edge) for edge in edges]
    if 0 in global_shape or np.prod([float(n) for n in size]) > _CELLS_A_BOX * len(offsets) + 1024:
        return False
    cells = np.zeros(size, dtype=np.int64)
    low = [np.searchsorted(edge, column) for edge, column in zip(edges, offsets.T, strict=True)]
    high = [np.searchsorted(edge, column) for edge, column in zip(edges, stops.T, strict=True)]
    for corner in range(1 << num_dims):
        where = tuple(high[d] if corner >> d & 1 else low[d] for d in range(num_dims))
        np.add.at(cells, where, -1 if corner.bit_count() % 2 else 1)
    for axis in range(num_dims):
        np.cumsum(cells, axis=axis, out=cells)
    return bool((cells[tuple(slice(0, n - 1) for n in size)] == 1).all())


def coverage_fault(global_shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """None where `boxes` tile the tensor exactly once (empty boxes don't count), else what is wrong, in words.

    Boxes inside the tensor, without overlap, with as many elements as the tensor, tile it.
    """
    full = [box for box in boxes if box.num_elements > 0]
    for box in boxes:
        if len(box.shape) != len(global_shape) or any(
            a + n > size for a, n, size in zip(box.offset, box.shape, global_shape, strict=True)
        ):
            return f"box {_text(box)} lies outside the shape {list(global_shape)}"
    overlap = _overlap(full)
    if overlap is not None:
        return f"boxes {_text(overlap[0])} and {_text(overlap[1])} overlap"
    missing = whole(global_shape).num_elements - sum(box.num_elements for box in full)
    return f"{missing} of {whole(global_shape).num_elements} elements are in no box" if missing else None


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, by a sweep along the axis on which the boxes differ most."""
    if len(boxes) < 2:
        return None
    num_dims = len(boxes[0].shape)
    if num_dims == 0:
        return boxes[0], boxes[1]
    axis = max(range(num_dims), key=lambda d: len({box.offset[d] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offset[axis]):
        active = [other for other in active if other.offset[axis] + other.shape[axis] > box.offset[axis]]
        for other in active:
            if box.intersect(other) is not None:
                return other, box
        active.append(box)
    return None


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(box.offset, box.shape, strict=True)) + "]"
