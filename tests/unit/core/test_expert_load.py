"""The load of experts: its three figures, and the picture of all of them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from phalanx.core.expert_load import MAX_CELLS, ExpertHeat, ExpertLoad


@pytest.mark.parametrize(
    ("counts", "load"),
    [
        ([[2, 2], [2, 2]], ExpertLoad(1.0, 1.0, 0.0)),
        ([[4, 0], [1, 3]], ExpertLoad(2.0, 1.75, 0.25)),
        ([[4, 0], [0, 0], [1, 3]], ExpertLoad(2.0, 1.75, 0.25)),
        ([[0, 0], [0, 0]], ExpertLoad(1.0, 1.0, 1.0)),
    ],
)
def test_load_is_the_busiest_over_the_mean_of_layers_that_have_tokens(
    counts: list[list[int]], load: ExpertLoad
) -> None:
    assert ExpertLoad.of(np.array(counts)) == load


def test_load_of_a_step_carries_its_loss_of_balance() -> None:
    assert ExpertLoad.of(np.array([[1, 1]]), 0.25).balance_loss == 0.25


def test_heat_gives_each_expert_back_as_a_multiple_of_its_layers_mean() -> None:
    counts = np.random.default_rng(0).integers(0, 5000, (60, 256))
    counts[3] = 0
    counts[:, 7] = 0
    heat = ExpertHeat.of(counts)
    assert (heat.num_layers, heat.num_experts, heat.experts_per_cell, len(heat.load)) == (60, 256, 1, 60 * 256)
    found, means = heat.multiples(), counts.mean(1, keepdims=True)
    expected = np.divide(counts, means, out=np.zeros(counts.shape), where=means > 0)
    assert (found[expected == 0] == 0).all()
    near = expected > 2**-7.9
    assert np.abs(found[near] / expected[near] - 1).max() < 0.023


def test_heat_keeps_what_lies_beyond_its_range_in_sight() -> None:
    heat = ExpertHeat.of(np.array([[1_000_000, *[1] * 999]]))
    assert heat.load[0] == 255 and set(heat.load[1:]) == {1}, "the least is told from none"


def test_heat_of_many_experts_shares_cells_and_the_busiest_of_a_cell_counts() -> None:
    rows = [[random.Random(layer).randrange(1, 9) for _ in range(10)] for layer in range(4)]
    counts = np.array(rows)
    heat = ExpertHeat.of(counts, max_cells=16)
    assert heat.experts_per_cell == 3 and heat.multiples().shape == (4, 4)
    for row, found in zip(rows, heat.multiples(), strict=True):
        expected = [max(row[at : at + 3]) / (sum(row) / 10) for at in range(0, 10, 3)]
        assert found == pytest.approx(expected, rel=0.023)


@pytest.mark.parametrize(("layers", "experts"), [(61, 384), (128, 1024), (1, MAX_CELLS + 1)])
def test_heat_is_bounded_for_any_model(layers: int, experts: int) -> None:
    heat = ExpertHeat.of(np.ones((layers, experts), np.int64))
    assert len(heat.load) <= MAX_CELLS
    assert len(heat.load) == layers * math.ceil(experts / heat.experts_per_cell)
