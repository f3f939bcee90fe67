"""Which checkpoints stay and which go, each with its reason in words. Pure: facts in, decisions out.

Only committed checkpoints are decided here; leftovers without a manifest are the business of `collection`. One that is
dead (off the live chain) goes unless somebody needs it. Of the live ones these stay: the newest, the newest that is not
damaged, those that an attempt on the chain started from, what the job's quotas keep (`quota`), and what is pinned,
forked from or being read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from phalanx.checkpoint.facts import Decision, Facts, Policy
from phalanx.checkpoint.quota import kept_regular, kept_speculative, why_over
from phalanx.lineage import Attempt, CheckpointRef, Link

__all__ = ["Decision", "Facts", "Policy", "decide", "needed_why", "resume_why", "why_dead"]


def decide(policy: Policy, facts: Facts) -> tuple[Decision, ...]:
    """One decision for each committed checkpoint, in their order."""
    kept = kept_speculative(policy, facts) | kept_regular(policy, facts) | _newest(facts)
    return tuple(_decision(ref, policy, facts, kept) for ref in sorted(facts.committed))


def _decision(ref: CheckpointRef, policy: Policy, facts: Facts, kept: Mapping[CheckpointRef, str]) -> Decision:
    needed = needed_why(ref, facts)
    if needed is not None:
        return Decision(ref, True, needed)
    if not facts.is_live(ref):
        return Decision(ref, False, f"dead: {why_dead(ref, facts.attempts, facts.links)}")
    if ref in kept:
        return Decision(ref, True, kept[ref])
    return Decision(ref, False, why_over(ref, policy, facts))


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
    """Why the job could need this checkpoint to go on, or to go back, or None."""
    if ref == facts.last_promoted():
        return "the last speculative checkpoint that was found healthy"
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
    live, good = facts.live(), facts.good()
    found: dict[CheckpointRef, str] = {}
    if live:
        found[live[-1]] = "the newest live checkpoint"
    if good and good[-1] != live[-1]:
        found[good[-1]] = "the newest live checkpoint that is not damaged"
    return found
