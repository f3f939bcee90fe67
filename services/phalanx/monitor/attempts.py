"""The attempts of a run, for its lineage: pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """One attempt. parent_attempt: 0 where it started from nothing. checkpoints: steps of those that exist, ascending;
    damaged, pinned: which of them. layout: in words, "" while unknown.
    saved_step: the checkpoint of which `saved_ns` (since the epoch, when it was committed, by the clock of whoever
    told) and `saved_bytes` tell; 0 where unknown. stall_s: of its last save, None while unknown. num_skipped: saves
    left out.
    """

    number: int
    parent_attempt: int = 0
    parent_step: int = 0
    last_step: int = 0
    checkpoints: tuple[int, ...] = ()
    layout: str = ""
    damaged: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()
    saved_step: int = 0
    saved_ns: int = 0
    saved_bytes: int = 0
    stall_s: float | None = None
    num_skipped: int = 0

    @property
    def good(self) -> tuple[int, ...]:
        """Steps of the checkpoints from which one can go on."""
        return tuple(step for step in self.checkpoints if step not in self.damaged)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that exists. created_ns: when it was committed, since the epoch; 0 where unknown."""

    attempt: int
    step: int
    is_damaged: bool
    is_pinned: bool
    num_bytes: int
    created_ns: int


def with_checkpoints(facts: AttemptFacts, found: Sequence[Saved]) -> AttemptFacts:
    """The attempt with these checkpoints, which are all that it has."""
    by_step = {each.step: each for each in sorted(found, key=lambda each: each.step)}
    facts = replace(
        facts,
        checkpoints=tuple(by_step),
        damaged=tuple(step for step, each in by_step.items() if each.is_damaged),
        pinned=tuple(step for step, each in by_step.items() if each.is_pinned),
    )
    newest = max(facts.good, default=0)
    if not newest:
        return replace(facts, saved_step=0, saved_ns=0, saved_bytes=0)
    told_ns = facts.saved_ns if newest == facts.saved_step else 0
    each = by_step[newest]
    return replace(facts, saved_step=newest, saved_ns=told_ns or each.created_ns, saved_bytes=each.num_bytes)


def live(attempts: Mapping[int, AttemptFacts]) -> frozenset[int]:
    """Those on the chain of parents back from the newest one."""
    found: set[int] = set()
    number = max(attempts, default=0)
    while number in attempts and number not in found:
        found.add(number)
        number = attempts[number].parent_attempt
    return frozenset(found)


def last_steps(attempts: Mapping[int, AttemptFacts]) -> dict[int, float]:
    """For each attempt on the live chain the last step that counts: the one from which the next one went on."""
    on_chain = live(attempts)
    children = {attempts[number].parent_attempt: attempts[number].parent_step for number in on_chain}
    return {number: children.get(number, math.inf) for number in on_chain}


def newest_checkpoint(attempts: Mapping[int, AttemptFacts]) -> tuple[int, int] | None:
    """Attempt and step of the newest live checkpoint that is not damaged."""
    ends = last_steps(attempts)
    found = [(step, number) for number, end in ends.items() for step in attempts[number].good if step <= end]
    return max(found)[::-1] if found else None


def owner_of(attempts: Mapping[int, AttemptFacts], before: int, step: int) -> int:
    """The attempt before number `before` from whose checkpoint at `step` it starts; 0 where there is none."""
    having = [number for number, facts in attempts.items() if number < before and step in facts.checkpoints]
    return max(having, default=0)


def layout_words(placement: Mapping[str, Any]) -> str:
    """An attempt's placement in a few words: `4 ranks, dp_shard 2, tp 2`; "" where it does not say."""
    parallel = placement.get("parallel")
    sizes = parallel if isinstance(parallel, Mapping) else {}
    words = [f"{axis} {sizes[axis]}" for axis in AXES if isinstance(sizes.get(axis), int) and sizes[axis] > 1]
    world_size = placement.get("world_size")
    ranks = [f"{world_size} rank{'' if world_size == 1 else 's'}"] if isinstance(world_size, int) else []
    return ", ".join(ranks + words)
