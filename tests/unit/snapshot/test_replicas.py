"""Shares of steps in the memory of nodes, pure: who keeps what, and what survives the loss of one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.lineage import CheckpointRef, ObjectRef
from phalanx.snapshot.replicas import Kept, Placed, fits, newest_whole, partner_of

OLD, NEW = CheckpointRef(1, 5), CheckpointRef(1, 10)
rings = st.lists(st.text("abcdefgh", min_size=1, max_size=3), min_size=2, max_size=12, unique=True)


def kept_of(nodes, ref=NEW, ranks_a_node=2):
    """What nodes keep of a step that was handed over whole."""
    kept = {node: set() for node in nodes}
    for number, node in enumerate(nodes):
        for rank in range(number * ranks_a_node, (number + 1) * ranks_a_node):
            share = Kept(ref, rank, len(nodes) * ranks_a_node)
            kept[node].add(share)
            kept[partner_of(node, nodes)].add(share)
    return kept


def test_partner_is_the_next_node_of_the_ring_and_one_alone_has_none():
    assert [partner_of(node, "abc") for node in "abc"] == ["b", "c", "a"]
    assert partner_of("a", "a") is None


@given(rings)
def test_loss_of_any_one_node_loses_no_share(nodes):
    kept = kept_of(nodes)
    for lost in nodes:
        assert newest_whole({node: shares for node, shares in kept.items() if node != lost}) == NEW


@given(rings.filter(lambda nodes: len(nodes) > 2))
def test_loss_of_a_node_and_its_partner_loses_the_step(nodes):
    kept = kept_of(nodes)
    for lost in nodes:
        gone = (lost, partner_of(lost, nodes))
        assert newest_whole({node: shares for node, shares in kept.items() if node not in gone}) is None


def test_step_that_is_half_handed_over_is_none_and_the_one_before_is_taken():
    kept = kept_of("ab", OLD)
    kept["a"] |= {Kept(NEW, 0, 4), Kept(NEW, 1, 4)}
    kept["b"] |= {Kept(NEW, 0, 4), Kept(NEW, 2, 4)}
    assert newest_whole(kept) == OLD
    kept["b"].add(Kept(NEW, 3, 4))
    assert newest_whole(kept) == NEW
    assert newest_whole({}) is None


def test_shares_of_another_world_do_not_add_up():
    assert newest_whole({"a": {Kept(NEW, 0, 2), Kept(NEW, 1, 4)}}) is None


def test_objects_must_lie_one_behind_the_other_within_the_memory():
    first, second = (Placed(ObjectRef(key, 10, "d"), start) for key, start in (("x", 0), ("y", 16)))
    assert fits([first, second], 26)
    assert not fits([first, second], 25) and not fits([second, first], 26)
    assert not fits([Placed(ObjectRef("x", -1, "d"), 0)], 26) and not fits([Placed(ObjectRef("x", 1, "d"), -1)], 26)
