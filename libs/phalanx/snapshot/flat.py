"""A tensor's memory as plain bytes, bytes as a tensor, and bytes of a stored box into the tensors that need them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from phalanx.core.box import Box, HeldTensor
from phalanx.snapshot.parts import StoredBox


def as_torch(values: np.ndarray, stored: StoredBox) -> torch.Tensor:
    """The values of a stored box as a tensor; by way of uint8, since numpy has no bfloat16."""
    raw = torch.from_numpy(values.reshape(-1).view(np.uint8))
    return raw.view(getattr(torch, stored.dtype)).view(stored.box.shape)


def bytes_for(target: torch.Tensor, stored: StoredBox) -> np.ndarray | None:
    """The memory of `target`, uint8 [bytes of `stored`], where the box's bytes can lie in it as they are stored: in
    host memory, contiguous, of the same shape and type; else None.
    """
    is_plain = target.device.type == "cpu" and target.is_contiguous() and not (target.is_conj() or target.is_neg())
    if not is_plain or tuple(target.shape) != stored.box.shape or target.dtype != getattr(torch, stored.dtype):
        return None
    found: np.ndarray = target.detach().reshape(-1).view(torch.uint8).numpy()
    return found


def boxes_between(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes that tile elements [start, stop), counted row-major, of a tensor of `shape`, in their order: at most two
    for each axis, and one.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row) if start % row else ()
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, stop % row)


def _in_row(shape: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[Box]:
    for inner in boxes_between(shape[1:], start, stop):
        yield Box((number, *inner.offset), (1, *inner.shape))


@torch.no_grad()
def scatter(stored: StoredBox, uses: Sequence[tuple[HeldTensor, Box]], start: int, piece: memoryview) -> None:
    """Copies what is needed of whole elements of a stored box, whose bytes from `start` on `piece` has.

    uses: held tensors, and the boxes (global indices) that each has in common with the stored one.
    """
    itemsize = stored.kind.itemsize
    raw = np.frombuffer(piece, dtype=np.uint8)
    if piece.readonly or raw.ctypes.data % itemsize:  # which no tensor can be
        raw = raw.copy()
    flat = torch.from_numpy(raw).view(getattr(torch, stored.dtype))
    done = 0
    for inner in boxes_between(stored.box.shape, start // itemsize, start // itemsize + flat.numel()):
        box = Box(tuple(map(sum, zip(inner.offset, stored.box.offset, strict=True))), inner.shape)
        values = flat[done : done + box.num_elements].view(box.shape)
        done += box.num_elements
        for held, needed in uses:
            common = box.intersect(needed)
            if common is not None:
                held.local.detach()[held.box.slices_of(common)].copy_(values[box.slices_of(common)])
