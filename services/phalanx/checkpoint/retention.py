"""Which checkpoints stay and which go, each with its reason in words. Pure: facts in, decisions out.

Only committed checkpoints are decided here; leftovers without a manifest are the business of `collection`. One that is
dead (off the live chain) goes unless somebody needs it. Of the live ones these stay: the newest, the newest that is not
damaged, those that an attempt on the chain started from, the latest k and every n-th step as the job asks, and what is
pinned, forked from or being read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.lineage import Attempt, CheckpointRef, Link


@dataclass(frozen=True, slots=True)
class Policy:
    """What the job asks for. keep_latest: newest good checkpoints that stay; 0 keeps all live ones. keep_every: those
    whose step is a multiple of it stay too; 0 for none.
    """

    keep_latest: int = 0
    keep_every: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What is so at one moment.

    links: the live chain, oldest first. attempts: all. committed: checkpoints that have a manifest. damaged: those that
    cannot be restored, and why. pinned: with the reason given. forked: origins of jobs that have not copied them yet,
    with the job's name. used: what is being read or written now, and by what.
    """

    links: tuple[Link, ...]
    attempts: tuple[Attempt, ...]
    committed: frozenset[CheckpointRef]
    damaged: Mapping[CheckpointRef, str] = field(default_factory=dict)
    pinned: Mapping[CheckpointRef, str] = field(default_factory=dict)
    forked: Mapping[CheckpointRef, str] = field(default_factory=dict)
    used: Mapping[CheckpointRef, str] = field(default_factory=dict)

    @property
    def newest_attempt(self) -> int:
        """The attempt that is not superseded; 0 before the first."""
        return self.links[-1].attempt.number if self.links else 0

    def is_live(self, ref: CheckpointRef) -> bool:
        """Whether a checkpoint of that name is, or would be, on the live chain."""
        return any(link.attempt.number == ref.attempt and link.has_step(ref.step) for link in self.links)

    def live(self) -> tuple[CheckpointRef, ...]:
        """The committed checkpoints on the live chain, oldest first."""
        return tuple(sorted(ref for ref in self.committed if self.is_live(ref)))

    def parents(self) -> dict[CheckpointRef, int]:
        """What the attempts on the live chain started from, and the newest attempt that did."""
        return {link.attempt.parent: link.attempt.number for link in self.links if link.attempt.parent is not None}


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a committed checkpoint stays, and why."""

    ref: CheckpointRef
    stays: bool
    why: str


def decide(policy: Policy, facts: Facts) -> tuple[Decision, ...]:
    """One decision for each committed checkpoint, in their order."""
    kept = _kept_live(policy, facts)
    return tuple(_decision(ref, policy, facts, kept) for ref in sorted(facts.committed))


def _decision(ref: CheckpointRef, policy: Policy, facts: Facts, kept: Mapping[CheckpointRef, str]) -> Decision:
    needed = needed_why(ref, facts)
    if needed is not None:
        return Decision(ref, True, needed)
    if not facts.is_live(ref):
        return Decision(ref, False, f"dead: {why_dead(ref, facts.attempts, facts.links)}")
    if ref in kept:
        return Decision(ref, True, kept[ref])
    if ref in facts.damaged:
        return Decision(ref, False, f"damaged: {facts.damaged[ref]}")
    return Decision(ref, False, f"older than the newest {policy.keep_latest} (checkpoint.keep_latest_k)")


def needed_why(ref: CheckpointRef, facts: Facts) -> str | None:
    """Why this checkpoint may not go whatever the policy says, or None. Holds for one without a manifest too."""
    if ref in facts.pinned:
        return f"pinned: {facts.pinned[ref]}" if facts.pinned[ref] else "pinned"
    if ref in facts.forked:
        return f"{facts.forked[ref]} was forked from it and has not copied it yet"
    if ref in facts.used:
        return f"in use: {facts.used[ref]}"
    parents = facts.parents()
    if ref in parents:
        return f"attempt {parents[ref]} started from it"
    return None


def resume_why(ref: CheckpointRef, facts: Facts) -> str | None:
    """Why the job could need this checkpoint to go on, or None."""
    newest = _newest(facts)
    parents = facts.parents()
    return newest.get(ref) or (f"attempt {parents[ref]} started from it" if ref in parents else None)


def why_dead(ref: CheckpointRef, attempts: Collection[Attempt], links: Sequence[Link]) -> str:
    """Why a checkpoint, live or not before, can never be restored from again."""
    numbers = [link.attempt.number for link in links]
    if ref.attempt not in numbers:
        return f"attempt {ref.attempt} is not among the ancestors of attempt {numbers[-1] if numbers else 0}"
    parent = next(attempt.parent for attempt in attempts if attempt.number == ref.attempt)
    if parent is not None and ref.step <= parent.step:
        return f"not after the parent of its attempt, {parent}"
    child = links[numbers.index(ref.attempt) + 1].attempt
    return f"attempt {child.number} went on from step {child.start_step}"


def _newest(facts: Facts) -> dict[CheckpointRef, str]:
    live = facts.live()
    good = [ref for ref in live if ref not in facts.damaged]
    found: dict[CheckpointRef, str] = {}
    if live:
        found[live[-1]] = "the newest live checkpoint"
    if good and good[-1] != live[-1]:
        found[good[-1]] = "the newest live checkpoint that is not damaged"
    return found


def _kept_live(policy: Policy, facts: Facts) -> dict[CheckpointRef, str]:
    """The live checkpoints that the policy keeps, with the reason of each."""
    live = facts.live()
    if policy.keep_latest == 0:
        return dict.fromkeys(live, "all live checkpoints stay (checkpoint.keep_latest_k is 0)") | _newest(facts)
    good = [ref for ref in live if ref not in facts.damaged]
    kept: dict[CheckpointRef, str] = {}
    if policy.keep_every:
        why = f"every {policy.keep_every} steps one stays (checkpoint.keep_every_n)"
        kept |= {ref: why for ref in good if ref.step % policy.keep_every == 0}
    why = f"among the newest {policy.keep_latest} (checkpoint.keep_latest_k)"
    kept |= dict.fromkeys(good[-policy.keep_latest :], why)
    return kept | _newest(facts)
