"""From ranks to nodes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.spec import parse_job
from phalanx.train.placement import Capacity, Demand, Misfit, Placement, place
from phalanx.train.shares import demand_of, prepared_demand
from phalanx.train.states import Preparation


def nodes(*free: int, **fields: str) -> list[Capacity]:
    return [Capacity(f"n{index}", slots, **fields) for index, slots in enumerate(free)]


def blocks(found: Placement | Misfit) -> dict[str, list[int]]:
    assert not isinstance(found, Misfit), found.why
    return {each.node_id: list(each.ranks) for each in found}


powers = st.sampled_from([1, 2, 4, 8])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Demand, list[Capacity]]:
    pp, tp, dp = draw(powers), draw(powers), draw(st.integers(1, 6))
    capacity = st.builds(
        Capacity,
        node_id=st.integers(0, 99).map("n{:02d}".format),
        num_free=st.integers(0, 16),
        nvlink_domain=st.sampled_from(["", "d1", "d2"]),
        rail=st.sampled_from(["", "r1", "r2"]),
        leaf_switch=st.sampled_from(["", "s1", "s2"]),
        is_avoided=st.booleans(),
    )
    unique = draw(st.lists(capacity, max_size=12, unique_by=lambda node: node.node_id))
    return Demand(pp * tp * dp, pp, tp), unique


@settings(max_examples=400, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_placement_found_is_whole_fits_and_does_not_depend_on_order(
    case: tuple[Demand, list[Capacity]], draw: random.Random
) -> None:
    demand, capacities = case
    found = place(demand, capacities)
    shuffled = draw.sample(capacities, len(capacities))
    assert place(demand, shuffled) == found
    if isinstance(found, Misfit):
        assert found.why.startswith("waits for")
        return
    by_id = {node.node_id: node for node in capacities}
    ranks = [rank for each in found for rank in each.ranks]
    assert ranks == list(range(demand.world_size))
    assert len({each.node_id for each in found}) == len(found)
    assert all(len(each.ranks) <= by_id[each.node_id].num_free for each in found)
    node_of = {rank: by_id[each.node_id] for each in found for rank in each.ranks}
    for first in range(0, demand.world_size, demand.tp):
        group = [node_of[rank] for rank in range(first, first + demand.tp)]
        assert len({node.domain for node in group}) == 1


@settings(max_examples=200, deadline=None)
@given(cases())
def test_placement_is_found_wherever_groups_fit_on_single_nodes(case: tuple[Demand, list[Capacity]]) -> None:
    demand, capacities = case
    room = sum(node.num_free // demand.tp for node in capacities)
    if room >= demand.num_groups:
        assert not isinstance(place(demand, capacities), Misfit)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_placement_takes_an_avoided_node_only_where_it_must(case: tuple[Demand, list[Capacity]]) -> None:
    demand, capacities = case
    rest = [node for node in capacities if not node.is_avoided]
    if not isinstance(place(demand, rest), Misfit):
        avoided = {node.node_id for node in capacities if node.is_avoided}
        assert not avoided & set(blocks(place(demand, capacities)))


def test_job_that_fits_one_node_takes_one() -> None:
    assert blocks(place(Demand(4), nodes(2, 4, 4))) == {"n1": [0, 1, 2, 3]}


def test_job_takes_the_node_that_it_fills_best() -> None:
    assert blocks(place(Demand(2), nodes(8, 2, 4))) == {"n1": [0, 1]}


def test_stages_lie_on_different_nodes_and_tensor_groups_on_one() -> None:
    assert blocks(place(Demand(16, pp=2, tp=8), nodes(8, 8))) == {"n0": list(range(8)), "n1": list(range(8, 16))}


def test_nodes_of_a_stage_all_take_the_same_share_so_that_peers_share_a_rail() -> None:
    found = blocks(place(Demand(32, pp=2, tp=4), nodes(8, 8, 8, 8)))
    assert [len(ranks) for ranks in found.values()] == [8, 8, 8, 8]
    assert all(ranks[0] % 8 == 0 for ranks in found.values())


def test_no_node_straddles_a_stage_where_another_choice_is_there() -> None:
    found = blocks(place(Demand(6, pp=2), nodes(2, 2, 2, 1, 1, 1, 1)))
    stages = [{rank // 3 for rank in ranks} for ranks in found.values()]
    assert all(len(stage) == 1 for stage in stages)


def test_neighbours_win_over_strangers() -> None:
    near = [Capacity(f"b{index}", 8, leaf_switch="s2") for index in range(2)]
    far = [Capacity("a0", 8, leaf_switch="s1"), Capacity("c0", 8, leaf_switch="s3")]
    assert set(blocks(place(Demand(16), [*far, *near]))) == {"b0", "b1"}


def test_tensor_group_larger_than_a_node_spans_its_nvlink_domain() -> None:
    rack = [Capacity(f"g{index}", 4, nvlink_domain="rack") for index in range(4)]
    alone = [Capacity("a", 4), Capacity("z", 4)]
    assert set(blocks(place(Demand(16, tp=16), [*alone, *rack]))) == {"g0", "g1", "g2", "g3"}


def test_nodes_of_different_sizes_are_filled_where_no_even_share_fits() -> None:
    assert sorted(map(len, blocks(place(Demand(7), nodes(4, 2, 1))).values())) == [1, 2, 4]


@pytest.mark.parametrize(
    ("demand", "free", "words"),
    [
        (Demand(8), (4, 2), "waits for 8 slots: 6 are free, on 2 nodes"),
        (Demand(8), (4,), "4 are free, on 1 node"),
        (Demand(2), (), "0 are free, as no node has any"),
        (Demand(8, tp=8), (4, 4), "each 8 (parallel.tp) in one NVLink domain"),
    ],
)
def test_job_that_does_not_fit_says_why(demand: Demand, free: tuple[int, ...], words: str) -> None:
    found = place(demand, nodes(*free))
    assert isinstance(found, Misfit) and words in found.why


def test_placement_of_a_large_cluster_is_quick() -> None:
    found = place(Demand(16_384, pp=16, tp=8), [Capacity(f"n{index:04d}", 8) for index in range(2_048)])
    assert len(blocks(found)) == 2_048


def test_a_job_without_a_layout_needs_what_is_chosen_until_a_node_has_prepared_another():
    tables = {
        "job": {"name": "x", "storage": "memory://x"},
        "model": {"preset": "tiny"},
        "data": {"train": "memory://x/train"},
        "training": {"seq_len": 32, "steps": 4, "global_batch_size": 2},
        "optimizer": {"lr": 1e-3},
        "parallel": {"layout": "auto"},
        "cluster": {"nproc": 4},
    }
    spec = parse_job(tables)
    assert demand_of(spec) == Demand(4, pp=1, tp=2)  # two windows a batch
    prepared = parse_job({**tables, "parallel": {"pp": 2}}).placement(4)
    assert prepared_demand(Preparation({}, "sha256:i", "sha256:c", prepared)) == Demand(4, pp=2)
