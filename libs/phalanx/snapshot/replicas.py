"""Which node keeps whose share of a step in memory, when the step is sealed, and from whom a share is read. Pure.

Nodes stand in a ring by the order of their ranks. The share of a node (what its ranks own of the step) is kept by the
node itself and by the one behind it, its partner: two copies of every box, on two machines. A step is sealed when every
share lies whole, with one digest, with both of its keepers. Only a sealed step may be gone on from.

What a node keeps is double-buffered (`Shelf`): the newest sealed step, and the one that comes in. The sealed one leaves
when the next is sealed, and not before; so whenever a node dies, the others hold the newest sealed step together. It is
a two-phase commit (Gray, Notes on Data Base Operating Systems, 1978): nodes vote, whoever opens attempts decides.
Steps are ordered by attempt, then step: what an older attempt still sends never replaces what a newer one
keeps. docs/decisions/peer-replicas.md tells why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef


@dataclass(frozen=True, slots=True)
class Copy:
    """A share that lies whole in a node's memory. owner: whose share it is. keeper: in whose memory. digest: of the
    list of its objects with their digests.
    """

    owner: str
    keeper: str
    digest: str


def keepers(nodes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """By owner the nodes that keep its share, itself first. nodes: in the order of their ranks, each once. A node that
    is alone has no partner.
    """
    assert len(set(nodes)) == len(nodes), f"a node stands twice in {nodes}"
    ring = [*nodes[1:], *nodes[:1]]
    return {owner: tuple(dict.fromkeys((owner, partner))) for owner, partner in zip(nodes, ring, strict=True)}


def owners(keeper: str, nodes: Sequence[str]) -> tuple[str, ...]:
    """Whose shares a node keeps, its own first."""
    return tuple(sorted((owner for owner, kept in keepers(nodes).items() if keeper in kept), key=lambda o: o != keeper))


def is_sealed(nodes: Sequence[str], copies: Collection[Copy]) -> bool:
    """Whether these copies of a step seal it. A single node never does: what it loses nobody has."""
    by_place = {(copy.owner, copy.keeper): copy.digest for copy in copies}
    wanted = keepers(nodes)
    if any(len(kept) < 2 for kept in wanted.values()):
        return False
    digests = ({by_place.get((owner, keeper)) for keeper in kept} for owner, kept in wanted.items())
    return bool(nodes) and all(len(found) == 1 and None not in found for found in digests)


def sources(nodes: Sequence[str], copies: Iterable[Copy], alive: Collection[str]) -> dict[str, str] | None:
    """By owner the node from which its share of a sealed step is read: itself where it lives, else its partner. None
    where some share is lost with both of its keepers: then storage is all there is.
    """
    held = {(copy.owner, copy.keeper) for copy in copies if copy.keeper in alive}
    found: dict[str, str] = {}
    for owner, kept in keepers(nodes).items():
        living = [keeper for keeper in kept if (owner, keeper) in held]
        if not living:
            return None
        found[owner] = living[0]
    return found


def goes_on_from(
    stored: CheckpointRef | None, sealed: CheckpointRef | None, newest_attempt: int
) -> CheckpointRef | None:
    """What the next attempt goes on from: the sealed step where it is further than the newest live checkpoint that is
    stored. It must be of the newest attempt: one of an older attempt lies on no chain that a newer one has left.
    """
    if sealed is None or sealed.attempt != newest_attempt:
        return stored
    return sealed if stored is None or sealed.step > stored.step else stored


@dataclass(frozen=True, slots=True)
class Shelf:
    """What one node keeps. owners: whose shares. sealed: the newest step that it knows to be sealed. filling: the step
    that comes in, and the owners whose shares of it are whole here. Each change gives a new shelf; what is on neither
    is free to go.

    A node that holds all its shares of a step has voted for it, and a vote binds: until it hears that the step is
    sealed or given up, it keeps both steps and takes no other, for the decision may have been made already.
    """

    owners: frozenset[str]
    sealed: CheckpointRef | None = None
    filling: CheckpointRef | None = None
    whole: frozenset[str] = frozenset()

    @property
    def kept(self) -> tuple[CheckpointRef, ...]:
        """The steps of which something must stay in memory."""
        return tuple(ref for ref in (self.sealed, self.filling) if ref is not None)

    @property
    def vote(self) -> CheckpointRef | None:
        """The step for which this node has voted and of which it knows no decision."""
        return self.filling if self.whole >= self.owners else None

    def begin(self, ref: CheckpointRef) -> Shelf:
        """A share of this step comes in. A newer step takes the place of one that this node has not voted for. Raises
        PhalanxError for a step that is not newer than what is kept, or that comes before a decision.
        """
        if ref == self.filling:
            return self
        newest = max(self.kept, default=None)
        if newest is not None and (ref <= newest or self.vote is not None):
            raise PhalanxError(
                f"replica of {ref}",
                expected=f"a step behind {newest}, once it is known whether that one is sealed",
                remedy="leave this step out",
            )
        return replace(self, filling=ref, whole=frozenset())

    def finish(self, ref: CheckpointRef, owner: str) -> Shelf:
        """A share is whole. One of a step that was overtaken meanwhile changes nothing."""
        return replace(self, whole=self.whole | {owner}) if ref == self.filling else self

    def seal(self, ref: CheckpointRef) -> Shelf:
        """The step is sealed: it takes the place of the one before. A node that has not voted for it (its process began
        anew meanwhile) keeps what it has.
        """
        return Shelf(self.owners, sealed=ref) if ref == self.vote else self

    def give_up(self, ref: CheckpointRef) -> Shelf:
        """The step will not be sealed; the one before stays."""
        return replace(self, filling=None, whole=frozenset()) if ref == self.filling else self
