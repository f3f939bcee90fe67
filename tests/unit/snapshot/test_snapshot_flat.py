"""Pieces of a stored box, put straight where they are needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_job import random_tensor, same_bits

from phalanx.core.box import Box, HeldTensor, whole
from phalanx.snapshot.flat import boxes_between, scatter
from phalanx.snapshot.parts import StoredBox


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_boxes_between_two_elements_are_those_in_row_major_order_and_few(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    start = data.draw(st.integers(0, numbers.size))
    stop = data.draw(st.integers(start, numbers.size))
    boxes = list(boxes_between(shape, start, stop))
    found = [numbers[whole(shape).slices_of(box)].reshape(-1) for box in boxes]
    assert np.array_equal(np.concatenate([np.empty(0), *found]), np.arange(start, stop))
    assert len(boxes) <= 2 * len(shape) + 1 and all(box.num_elements for box in boxes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
@pytest.mark.parametrize("is_readonly", [True, False])
def test_pieces_in_any_order_fill_every_box_that_needs_them(dtype: torch.dtype, is_readonly: bool) -> None:
    full = random_tensor((9, 7, 5), dtype, 1)
    box = Box((1, 2, 0), (7, 4, 5))
    raw = full[whole((9, 7, 5)).slices_of(box)].contiguous().view(torch.uint8).numpy().tobytes()
    stored = StoredBox("t", str(dtype)[6:], (9, 7, 5), box, "key", 0, 1 << 20, ("0" * 16,))
    boxes = [Box((0, 3, 1), (9, 2, 3)), Box((4, 0, 0), (2, 7, 5))]
    held = [HeldTensor("t", (9, 7, 5), each, torch.zeros(each.shape, dtype=dtype)) for each in boxes]
    common = [each.intersect(box) for each in boxes]
    uses = [(tensor, needed) for tensor, needed in zip(held, common, strict=True) if needed is not None]
    step = 13 * dtype.itemsize
    for start in reversed(range(0, len(raw), step)):
        piece = raw[start : start + step]
        # One byte off, as a piece of a longer read may lie.
        scatter(stored, uses, start, memoryview(piece if is_readonly else bytearray(b"x" + piece))[not is_readonly :])
    for tensor, needed in uses:
        expected = torch.zeros(tensor.box.shape, dtype=dtype)
        expected[tensor.box.slices_of(needed)] = full[whole((9, 7, 5)).slices_of(needed)]
        assert same_bits(tensor.local, expected)
