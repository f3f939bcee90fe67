"""Initial weights by counter: any box of a tensor has the bits of the whole, in torch and numpy, and the values are
normal.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.box import Box, whole
from phalanx.models.protocol import Initial
from phalanx.parallel.initialise import CHUNK_ELEMENTS, STD_OF_SUM, fill, initial_key, irwin_hall

SHAPE = (40, 24)
NORMAL = Initial(std=0.02)
GOLDEN = [-0.016530392691493034, -0.0006993095739744604, 0.018699336796998978, 0.022975552827119827]


def _filled(
    box: Box, shape: tuple[int, ...] = SHAPE, seed: int = 1, name: str = "w", initial: Initial = NORMAL
) -> torch.Tensor:
    local = torch.empty(box.shape)
    fill(local, box, shape, initial, seed, name)
    return local


@settings(max_examples=60, deadline=None)
@given(st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in SHAPE)))
def test_any_box_equals_that_part_of_the_whole(edges: tuple[list[int], list[int]]) -> None:
    box = Box(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))
    assert torch.equal(_filled(box), _filled(whole(SHAPE))[whole(SHAPE).slices_of(box)])


def test_numpy_gives_the_bits_of_torch() -> None:
    with np.errstate(over="ignore"):
        sums = irwin_hall(np.arange(40 * 24, dtype=np.int64), initial_key(1, "w"))
    ours = (sums.astype(np.float64) * (0.02 / STD_OF_SUM)).astype(np.float32)
    assert np.array_equal(ours.reshape(SHAPE), _filled(whole(SHAPE)).numpy())


def test_box_over_several_chunks_equals_its_parts() -> None:
    shape = (3, CHUNK_ELEMENTS // 2 + 7)
    rows = torch.cat([_filled(Box((row, 0), (1, shape[1])), shape) for row in range(3)])
    assert torch.equal(_filled(whole(shape), shape), rows)


def test_values_are_normal_with_the_asked_deviation() -> None:
    shape = (1000, 500)
    values = _filled(whole(shape), shape).double() / 0.02
    assert abs(values.mean()) < 5e-3
    assert values.std() == pytest.approx(1.0, abs=5e-3)
    assert values.abs().max() < 8 * 3**0.5 / 2**0.5  # the end of the Irwin-Hall sum's range: sqrt(24)
    # kurtosis of a sum of 8 uniforms is 3 - 6 / (5 * 8)
    assert (values**4).mean() == pytest.approx(3 - 0.15, abs=0.05)
    assert (values.abs() < 1).double().mean() == pytest.approx(0.6827, abs=0.01)


def test_another_seed_or_name_gives_unrelated_values() -> None:
    base = _filled(whole(SHAPE)).flatten()
    for other in (_filled(whole(SHAPE), seed=2), _filled(whole(SHAPE), name="v")):
        assert abs(torch.corrcoef(torch.stack((base, other.flatten())))[0, 1]) < 0.15


def test_constant_ignores_seed_and_name() -> None:
    assert torch.equal(_filled(whole(SHAPE), initial=Initial(value=1.0)), torch.ones(SHAPE))


def test_values_are_frozen() -> None:
    """A golden value: another one would change every run's start under an unchanged identity."""
    assert _filled(whole((4,)), (4,)).tolist() == GOLDEN
