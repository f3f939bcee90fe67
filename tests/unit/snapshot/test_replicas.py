"""Peer replicas, pure: pairing in a ring, sealing, what a node keeps, and what survives the loss of one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef
from phalanx.snapshot.replicas import Copy, Shelf, goes_on_from, is_sealed, keepers, owners, sources

NODES = ("a", "b", "c", "d")
rings = st.lists(st.text("abcdefgh", min_size=1, max_size=3), min_size=2, max_size=12, unique=True)


def copies_of(nodes, digest=str.upper):
    return {Copy(owner, keeper, digest(owner)) for owner, kept in keepers(nodes).items() for keeper in kept}


def test_share_is_kept_by_its_node_and_the_one_behind_it():
    assert keepers(NODES) == {"a": ("a", "b"), "b": ("b", "c"), "c": ("c", "d"), "d": ("d", "a")}
    assert owners("a", NODES) == ("a", "d")
    assert keepers(("a",)) == {"a": ("a",)} and keepers(()) == {}


@given(rings)
def test_every_node_keeps_two_shares_and_every_share_is_kept_by_two(nodes):
    assert all(len(set(kept)) == 2 and kept[0] == owner for owner, kept in keepers(nodes).items())
    assert all(len(owners(node, nodes)) == 2 and owners(node, nodes)[0] == node for node in nodes)


@given(rings, st.data())
def test_step_is_sealed_by_all_copies_and_by_no_less(nodes, data):
    copies = copies_of(nodes)
    assert is_sealed(nodes, copies)
    gone = data.draw(st.sampled_from(sorted(copies, key=lambda copy: (copy.owner, copy.keeper))))
    assert not is_sealed(nodes, copies - {gone})
    other = Copy(gone.owner, gone.keeper, "other bytes")
    assert not is_sealed(nodes, (copies - {gone}) | {other})


def test_step_of_a_single_node_or_of_none_is_never_sealed():
    assert not is_sealed(("a",), {Copy("a", "a", "A")})
    assert not is_sealed((), set())


@given(rings, st.data())
def test_loss_of_any_one_node_leaves_a_source_for_every_share(nodes, data):
    dead = data.draw(st.sampled_from(nodes))
    alive = set(nodes) - {dead}
    found = sources(nodes, copies_of(nodes), alive)
    assert set(found) == set(nodes) and set(found.values()) <= alive
    assert all(found[owner] == owner for owner in alive), "one's own memory comes first"
    assert found[dead] == keepers(nodes)[dead][1]


@given(rings, st.data())
def test_shares_survive_unless_a_node_and_its_partner_are_lost(nodes, data):
    alive = data.draw(st.sets(st.sampled_from(nodes)))
    has_all = all(set(kept) & alive for kept in keepers(nodes).values())
    assert (sources(nodes, copies_of(nodes), alive) is not None) == has_all


def test_next_attempt_goes_on_from_the_sealed_step_only_where_it_is_further():
    """A sealed step of an attempt that a newer one has left lies on no chain."""
    stored = CheckpointRef(2, 10)
    assert goes_on_from(stored, CheckpointRef(2, 14), 2) == CheckpointRef(2, 14)
    assert goes_on_from(stored, CheckpointRef(2, 10), 2) == stored
    assert goes_on_from(stored, CheckpointRef(2, 8), 2) == stored
    assert goes_on_from(stored, CheckpointRef(1, 99), 2) == stored
    assert goes_on_from(None, CheckpointRef(1, 3), 1) == CheckpointRef(1, 3)
    assert goes_on_from(None, None, 0) is None


def test_shelf_keeps_the_sealed_step_until_the_next_is_sealed():
    shelf = Shelf(frozenset("ad"))
    first, second, third = (CheckpointRef(1, step) for step in (5, 10, 15))
    shelf = shelf.begin(first).finish(first, "a").finish(first, "d").seal(first)
    assert shelf.kept == (first,)
    shelf = shelf.begin(second).finish(second, "a")
    assert shelf.kept == (first, second) and shelf.vote is None
    assert shelf.seal(second) == shelf, "not whole here"
    shelf = shelf.begin(third)
    assert shelf.kept == (first, third), "one that nobody was promised gives way"
    assert shelf.finish(second, "d") == shelf, "what was overtaken changes nothing"
    assert shelf.give_up(third).kept == (first,)
    shelf = shelf.finish(third, "d").finish(third, "a").seal(third)
    assert shelf.kept == (third,)


def test_shelf_that_has_voted_takes_no_other_step_before_it_hears_the_decision():
    """The step may be sealed already: whoever lets it go then breaks the promise."""
    first, second = CheckpointRef(1, 5), CheckpointRef(1, 10)
    shelf = Shelf(frozenset("a")).begin(first).finish(first, "a")
    assert shelf.vote == first
    with pytest.raises(PhalanxError, match="once it is known whether that one is sealed"):
        shelf.begin(second)
    assert shelf.seal(first).begin(second).kept == (first, second)
    assert shelf.give_up(first).begin(second).kept == (second,)


@pytest.mark.parametrize("late", [CheckpointRef(1, 10), CheckpointRef(1, 99), CheckpointRef(2, 4), CheckpointRef(2, 5)])
def test_shelf_refuses_what_an_older_attempt_or_step_still_sends(late):
    kept = CheckpointRef(2, 5)
    shelf = Shelf(frozenset("a")).begin(kept).finish(kept, "a").seal(kept)
    with pytest.raises(PhalanxError, match="a step behind"):
        shelf.begin(late)
    assert shelf.begin(CheckpointRef(3, 1)).kept == (kept, CheckpointRef(3, 1))


class Ring:
    """Nodes that are sent shares and told decisions in any order. sealed: the newest step that was decided on."""

    def __init__(self, num_nodes):
        self.nodes = [f"n{number}" for number in range(num_nodes)]
        self.shelves = {node: Shelf(frozenset(owners(node, self.nodes))) for node in self.nodes}
        self.held = {node: set() for node in self.nodes}
        self.sealed = None

    def send(self, ref, owner, keeper):
        """A share comes to a node, which may refuse it."""
        try:
            shelf = self.shelves[keeper].begin(ref)
        except PhalanxError:
            return
        self.held[keeper].add((ref, owner))
        self._put(keeper, shelf.finish(ref, owner))
        if is_sealed(self.nodes, {copy for at, copy in self._copies() if at == ref}):
            self.sealed = ref

    def tell(self, node):
        """A node hears of the newest decision."""
        if self.sealed is not None:
            self._put(node, self.shelves[node].seal(self.sealed))

    def survives_any_loss(self):
        """Whether the sealed step is there whatever node is lost now."""
        copies = {copy for at, copy in self._copies() if at == self.sealed}
        losses = ({each for each in self.nodes if each != dead} for dead in self.nodes)
        return self.sealed is None or all(sources(self.nodes, copies, alive) is not None for alive in losses)

    def _put(self, node, shelf):
        self.shelves[node] = shelf
        self.held[node] = {(ref, owner) for ref, owner in self.held[node] if ref in shelf.kept}

    def _copies(self):
        return [(ref, Copy(owner, node, owner)) for node, held in self.held.items() for ref, owner in held]


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 4), st.data())
def test_ring_that_loses_a_node_at_any_moment_still_has_the_newest_sealed_step(num_nodes, data):
    """Shares of several steps and decisions arrive in any order; a decision is made the moment in which it may be."""
    ring = Ring(num_nodes)
    copies = [(owner, keeper) for owner, kept in keepers(ring.nodes).items() for keeper in kept]
    sends = [("send", CheckpointRef(1, step), *copy) for step in (1, 2, 3) for copy in copies]
    tells = [("tell", node) for node in ring.nodes] * 2
    for act, *arguments in data.draw(st.permutations(sends + tells)):
        getattr(ring, act)(*arguments)
        assert ring.survives_any_loss(), (ring.sealed, ring.held)


def test_ring_in_order_seals_every_step():
    ring = Ring(3)
    for step in (1, 2, 3):
        for owner, kept in keepers(ring.nodes).items():
            for keeper in kept:
                ring.send(CheckpointRef(1, step), owner, keeper)
        assert ring.sealed == CheckpointRef(1, step)
        for node in ring.nodes:
            ring.tell(node)
    assert all(shelf.kept == (CheckpointRef(1, 3),) for shelf in ring.shelves.values())
