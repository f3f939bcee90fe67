"""The attempts of a run, for its lineage: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """One attempt. parent_attempt: 0 where it started from nothing. checkpoints: steps, ascending. layout: in words, ""
    while unknown.
    """

    number: int
    parent_attempt: int = 0
    parent_step: int = 0
    last_step: int = 0
    checkpoints: tuple[int, ...] = ()
    layout: str = ""


def live(attempts: Mapping[int, AttemptFacts]) -> frozenset[int]:
    """Those on the chain of parents back from the newest one."""
    found: set[int] = set()
    number = max(attempts, default=0)
    while number in attempts and number not in found:
        found.add(number)
        number = attempts[number].parent_attempt
    return frozenset(found)


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
