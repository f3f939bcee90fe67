"""Boxes against sets of indices."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.box import Box, whole

sides = st.integers(0, 5)


@st.composite
def pairs(draw):
    rank = draw(st.integers(0, 3))
    return tuple(
        Box(tuple(draw(sides) for _ in range(rank)), tuple(draw(sides) for _ in range(rank))) for _ in range(2)
    )


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(
        itertools.product(*(range(start, start + size) for start, size in zip(box.offset, box.shape, strict=True)))
    )


@given(pairs())
def test_intersect_any_two_boxes_is_the_common_indices(boxes):
    one, other = boxes
    common = one.intersect(other)
    assert (indices(common) if common else set()) == indices(one) & indices(other)


@given(pairs())
def test_slices_of_an_inner_box_cut_its_elements_out(boxes):
    outer, other = boxes
    inner = outer.intersect(other)
    if inner is None:
        return
    grid = np.arange(1, 2 + max(whole((11, 11, 11)).num_elements, 1))[: 11 ** len(outer.shape)].reshape(
        (11,) * len(outer.shape)
    )
    held = grid[whole(grid.shape).slices_of(outer)]
    assert np.array_equal(held[outer.slices_of(inner)], grid[whole(grid.shape).slices_of(inner)])


@given(pairs())
def test_num_elements_is_the_number_of_indices(boxes):
    assert boxes[0].num_elements == len(indices(boxes[0]))
