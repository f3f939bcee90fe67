"""What is measured between ranks, and in which order."""

from __future__ import annotations

import itertools
import json

import pytest

from phalanx.fabric.plan import BY_HAND, NUM_SWEEPS, OPERATIONS, Plan, axes_of, axis_sizes, rounds_of, sizes_between
from phalanx.spec import Layout


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8, 9, 16])
def test_every_pair_meets_once_and_no_rank_has_two_partners(num_ranks: int) -> None:
    rounds = rounds_of(num_ranks)
    assert len(rounds) == num_ranks - 1 + num_ranks % 2
    for each in rounds:
        ranks = [rank for pair in each for rank in pair]
        assert len(set(ranks)) == len(ranks)
    met = [pair for each in rounds for pair in each]
    assert sorted(met) == list(itertools.combinations(range(num_ranks), 2))


@pytest.mark.parametrize(
    "layout, axes",
    [
        (Layout(dp_shard=4), ("dp_shard",)),
        (Layout(tp=2), ("tp",)),
        (Layout(dp_shard=2, tp=2), ("dp_shard", "tp", "world")),
        (Layout(dp_shard=2, cp=2), ("dp_shard_cp", "cp")),
        (Layout(cp=4), ("cp",)),
        (Layout(pp=2, dp_replicate=2, cp=2), ("pp", "dp_replicate", "cp", "world")),
    ],
)
def test_axes_are_those_that_exchange_anything_and_the_world(layout: Layout, axes: tuple[str, ...]) -> None:
    assert axes_of(layout) == axes


def test_sharding_goes_over_dp_shard_and_cp_together() -> None:
    assert axis_sizes(Layout(dp_shard=3, cp=2, tp=5)) == {
        "pp": 1,
        "dp_replicate": 1,
        "dp_shard_cp": 6,
        "cp": 2,
        "tp": 5,
    }


def test_sizes_grow_up_to_the_greatest() -> None:
    assert sizes_between(1024, 20_000) == (1024, 4096, 16384, 20_000)
    assert sizes_between(1024, 4096) == (1024, 4096)
    assert sizes_between(64, 64) == (64,)


def test_plan_survives_json_and_counts_its_phases() -> None:
    plan = Plan(Layout(dp_shard=2, tp=2), "cpu", (4, 16), (*OPERATIONS, *BY_HAND), pairs_at_once=1, network={"a": None})
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.num_phases == 3 * 7 * 2 + NUM_SWEEPS * 6 + 2
    assert len(list(plan.measurements())) == 3 * 7 * 2


def test_batches_of_pairs_are_as_wide_as_asked() -> None:
    wide = Plan(Layout(dp_shard=8), "cuda", (4,), pairs_at_once=4).batches()
    narrow = Plan(Layout(dp_shard=8), "cpu", (4,), pairs_at_once=3).batches()
    assert [len(batch) for batch in wide] == [4] * 7
    assert [len(batch) for batch in narrow] == [3, 1] * 7
    assert sorted(sum(wide, ())) == sorted(sum(narrow, ())) == list(itertools.combinations(range(8), 2))
    assert Plan(Layout(dp_shard=8), "cpu", (4,), pairs_at_once=0).batches() == []


def test_backend_is_that_of_the_device() -> None:
    assert [Plan(Layout(tp=2), device, (4,)).backend for device in ("cpu", "cuda")] == ["gloo", "nccl"]
