"""Do the stored boxes hold every element of every tensor exactly once? The question a commit must answer before a
checkpoint exists.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.box import Box, whole


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
