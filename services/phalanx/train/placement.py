"""From ranks to nodes: a pure function of the layout and what the nodes have.

The mesh is (pp, dp_replicate, dp_shard, cp, tp), tp innermost. A tensor-parallel group stays in one NVLink domain, on
one node where it fits. Every node gets one block of consecutive ranks, all of one size where that is possible: then a
stage's groups share nodes, stages lie on different nodes, and data-parallel peers have the same place on their nodes,
which is the same rail. Fewer nodes win over more, neighbours (leaf switch, rail group) over strangers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from phalanx.lineage.events import Assignment


@dataclass(frozen=True, slots=True)
class Capacity:
    """A node that may take ranks. num_free: slots. is_avoided: taken only where it can't be done without."""

    node_id: str
    num_free: int
    nvlink_domain: str = ""
    rail: str = ""
    leaf_switch: str = ""
    is_avoided: bool = False

    @property
    def domain(self) -> str:
        """Its NVLink domain; a host of its own where none is named."""
        return self.nvlink_domain or f"host {self.node_id}"


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job needs. pp, tp: of its layout."""

    world_size: int
    pp: int = 1
    tp: int = 1

    @property
    def num_groups(self) -> int:
        """Tensor-parallel groups: blocks of tp consecutive ranks."""
        return self.world_size // self.tp


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why the job can't be placed now, in one line."""

    why: str


Placement = tuple[Assignment, ...]


def place(demand: Demand, nodes: Iterable[Capacity]) -> Placement | Misfit:
    """Which ranks run where, in the order of ranks; the same answer for the same nodes in whatever order."""
    free = sorted((node for node in nodes if node.num_free > 0), key=lambda node: node.node_id)
    for usable in (tuple(node for node in free if not node.is_avoided), tuple(free)):
        found = _even(demand, usable) or _filled(demand, usable) or _across(demand, usable)
        if found:
            return found
    return Misfit(_why(demand, free))


def _even(demand: Demand, nodes: Sequence[Capacity]) -> Placement | None:
    """Nodes that all take the same number of groups, as few nodes as possible; each within one stage where that can
    be.
    """
    groups = demand.num_groups
    counts = [count for count in range(1, min(len(nodes), groups) + 1) if groups % count == 0]
    for is_aligned in (True, False):
        for count in counts:
            share = groups // count
            if _keeps_stages(share, groups // demand.pp) is not is_aligned:
                continue
            chosen = _neighbours([node for node in nodes if node.num_free // demand.tp >= share], count)
            if chosen:
                return _blocks(demand, [(node, share) for node in chosen])
    return None


def _keeps_stages(share: int, groups_of_stage: int) -> bool:
    """Whether blocks of `share` groups cross no border of a stage in their middle."""
    return groups_of_stage % share == 0 or share % groups_of_stage == 0


def _neighbours(nodes: Sequence[Capacity], count: int) -> list[Capacity] | None:
    """`count` of the nodes, as near to each other as can be, and those that are filled best."""
    nearness: tuple[Callable[[Capacity], str], ...] = (
        lambda node: node.domain,
        lambda node: node.leaf_switch or f"of {node.node_id}",
        lambda node: node.rail or f"of {node.node_id}",
        lambda node: "",
    )
    for key in nearness:
        by_place = sorted(nodes, key=lambda node: (key(node), node.num_free, node.node_id))
        groups = (list(members)[:count] for _, members in groupby(by_place, key))
        found = [group for group in groups if len(group) == count]
        if found:
            best = min(found, key=lambda group: (sum(node.num_free for node in group), _nearness(group[0])))
            return sorted(best, key=_nearness)
    return None


def _nearness(node: Capacity) -> tuple[str, str, str, str]:
    return (node.rail, node.leaf_switch, node.domain, node.node_id)


def _filled(demand: Demand, nodes: Sequence[Capacity]) -> Placement | None:
    """Nodes of different sizes, the largest first."""
    left = demand.num_groups
    chosen: list[tuple[Capacity, int]] = []
    for node in sorted(nodes, key=lambda node: (-(node.num_free // demand.tp), _nearness(node))):
        share = min(left, node.num_free // demand.tp)
        if share:
            chosen.append((node, share))
            left -= share
    return None if left else _blocks(demand, sorted(chosen, key=lambda each: _nearness(each[0])))


def _across(demand: Demand, nodes: Sequence[Capacity]) -> Placement | None:
    """Groups that span the nodes of an NVLink domain."""
    by_domain = [list(members) for _, members in groupby(sorted(nodes, key=_nearness), lambda node: node.domain)]
    left, first, placed = demand.num_groups, 0, []
    for members in sorted(by_domain, key=lambda group: (-_groups_of(demand, group), _nearness(group[0]))):
        ranks_left = min(left, _groups_of(demand, members)) * demand.tp
        left -= ranks_left // demand.tp
        for node in members:
            taken = min(ranks_left, node.num_free)
            if taken:
                placed.append(Assignment(node.node_id, tuple(range(first, first + taken))))
                first, ranks_left = first + taken, ranks_left - taken
    return None if left else tuple(placed)


def _groups_of(demand: Demand, members: Sequence[Capacity]) -> int:
    return sum(node.num_free for node in members) // demand.tp


def _blocks(demand: Demand, shares: Iterable[tuple[Capacity, int]]) -> Placement:
    placed, first = [], 0
    for node, share in shares:
        ranks = range(first, first + share * demand.tp)
        placed.append(Assignment(node.node_id, tuple(ranks)))
        first = ranks.stop
    return tuple(placed)


def _why(demand: Demand, free: Sequence[Capacity]) -> str:
    num_free = sum(node.num_free for node in free)
    if num_free < demand.world_size:
        on = f"on {len(free)} node{'' if len(free) == 1 else 's'}" if free else "as no node has any"
        return f"waits for {demand.world_size} slots: {num_free} are free, {on}"
    by_domain: dict[str, int] = {}
    for node in free:
        by_domain[node.domain] = by_domain.get(node.domain, 0) + node.num_free
    largest = max(by_domain.values())
    return (
        f"waits for {demand.num_groups} x {demand.tp} slots, each {demand.tp} (parallel.tp) in one NVLink domain: "
        f"{num_free} are free, at most {largest} in one domain"
    )
