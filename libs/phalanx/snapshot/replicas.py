"""Shares of steps in the memory of nodes: what one is, who keeps it, and which step can be had of them. Pure.

The share of a rank is the objects that a save of the step would create, in the order in which it would: tensors, step
records, the part object last. Its own node keeps it, and the next node in the ring of the attempt's nodes, its partner.
A step is whole while every rank's share lies with a node that lives; so losing one node loses none. Steps are ordered
by attempt, then step. docs/decisions/peer-replicas.md tells why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from phalanx.lineage import CheckpointRef, ObjectRef


@dataclass(frozen=True, slots=True)
class Placed:
    """An object of a share. start: the byte in the share's memory at which it lies."""

    ref: ObjectRef
    start: int

    @property
    def place(self) -> slice:
        """Its bytes."""
        return slice(self.start, self.start + self.ref.num_bytes)


@dataclass(frozen=True, order=True, slots=True)
class Kept:
    """A share that lies whole with a node. world_size: ranks that have a share of the step."""

    ref: CheckpointRef
    rank: int
    world_size: int


def partner_of(node: str, nodes: Sequence[str]) -> str | None:
    """Who keeps the shares of a node too. nodes: of the attempt, in their order, each once. None for one alone."""
    assert len(set(nodes)) == len(nodes), f"a node stands twice in {nodes}"
    return nodes[(nodes.index(node) + 1) % len(nodes)] if len(nodes) > 1 else None


def newest_whole(kept: Mapping[str, Collection[Kept]]) -> CheckpointRef | None:
    """The newest step of which these nodes hold every rank's share together."""
    by_step: dict[tuple[CheckpointRef, int], set[int]] = {}
    for shares in kept.values():
        for share in shares:
            by_step.setdefault((share.ref, share.world_size), set()).add(share.rank)
    whole = [ref for (ref, world_size), ranks in by_step.items() if ranks >= set(range(world_size))]
    return max(whole, default=None)


def fits(objects: Sequence[Placed], num_bytes: int) -> bool:
    """Whether these are objects that lie one behind the other in a memory of that size."""
    end = 0
    for each in objects:
        if each.start < end or each.ref.num_bytes < 0:
            return False
        end = each.place.stop
    return end <= num_bytes
