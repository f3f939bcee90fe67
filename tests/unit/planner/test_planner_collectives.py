from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.planner.collectives import (
    Group,
    Link,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    ring_all_reduce_s,
    send_s,
    tree_all_reduce_s,
    tree_crossing_bytes,
)
from phalanx.planner.network import TOPOLOGIES, cluster

FAST, SLOW = Link(3e-6, 300e9), Link(5e-6, 25e9)
groups = st.builds(
    lambda inner, domains: Group(inner * domains, inner, FAST, SLOW),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 8, 64, 512]),
)


def test_ring_on_one_node_is_the_printed_formula():
    group = Group(8, 8, FAST, SLOW)
    assert ring_all_reduce_s(1e9, group) == pytest.approx(2 * 7 * 3e-6 + 2 * 7 / 8 * 1e9 / 300e9)
    assert all_gather_s(1e9, group) == reduce_scatter_s(1e9, group) == ring_all_reduce_s(1e9, group) / 2


def test_ring_over_nodes_leaves_each_through_all_ranks_there():
    assert Group(64, 8, FAST, SLOW).ring_bytes_per_s == 8 * 25e9
    assert Group(64, 8, Link(3e-6, 100e9), SLOW).ring_bytes_per_s == 100e9
    assert Group(8, 1, FAST, SLOW).ring_bytes_per_s == 25e9


@given(groups, st.floats(1.0, 1e10))
def test_all_reduce_is_never_slower_than_its_halves_and_grows_with_size(group, num_bytes):
    assert all_reduce_s(num_bytes, group) <= 2 * all_gather_s(num_bytes, group)
    assert all_reduce_s(num_bytes, group) <= all_reduce_s(2 * num_bytes, group)


@given(groups)
def test_tree_wins_below_the_crossing_and_the_ring_above(group):
    crossing = tree_crossing_bytes(group)
    if crossing:
        assert tree_all_reduce_s(crossing / 2, group) < ring_all_reduce_s(crossing / 2, group)
        assert tree_all_reduce_s(crossing * 2, group) > ring_all_reduce_s(crossing * 2, group)
    elif group.ranks > 1:
        assert ring_all_reduce_s(1.0, group) <= tree_all_reduce_s(1.0, group)


def test_a_lone_rank_talks_to_nobody():
    alone = Group(1, 1, FAST, SLOW)
    for collective in (all_gather_s, reduce_scatter_s, all_reduce_s, all_to_all_s, send_s):
        assert collective(1e9, alone) == 0


def test_all_to_all_is_bound_by_what_leaves_the_node():
    assert all_to_all_s(1e9, Group(16, 8, FAST, SLOW)) == pytest.approx(5e-6 + 0.5e9 / 25e9)


def test_groups_follow_the_order_tp_cp_dp_pp():
    where = cluster("H100")
    assert where.group(8, 1).domains == 1 and where.group(4, 8).inner == 1
    assert where.group(16, 2).inner == 4 and where.group(64, 1).domains == 8


def test_traffic_that_leaves_a_pod_is_narrowed():
    narrow = cluster("H100", oversubscription=7, nodes_per_pod=4)
    assert narrow.group(4, 8).slow.bytes_per_s == 50e9
    assert narrow.group(5, 8).slow.bytes_per_s == pytest.approx(50e9 / 7)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_latency_grows_with_nodes_but_in_a_torus(topology):
    near, far = (cluster("H100", topology=topology).group(ranks, 8).slow.latency_s for ranks in (2, 2048))
    assert near == far if topology in {"torus", "dragonfly"} else near < far


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"topology": "ring"}, "fat-tree"), ({"network_gbps": -1}, "above 0"), ({"gpu": "H1000"}, "H100-80")],
)
def test_cluster_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(PhalanxError, match=message):
        cluster(**{"gpu": "H100", **wrong})
