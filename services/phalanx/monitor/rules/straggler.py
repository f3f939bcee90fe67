"""Which ranks are slower than their peers: pure.

A rank's busy time is what it worked in a step and did not wait for others. A straggler's median over its last
`num_steps` steps is above `factor` times the median of all ranks' medians (the lower one of an even number), and by at
least `floor_s`, below which times are noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from phalanx.monitor.rules.verdict import Kind, Verdict


@dataclass(frozen=True, slots=True)
class StragglerRule:
    """As above."""

    num_steps: int = 20
    factor: float = 1.5
    floor_s: float = 0.005


def stragglers(
    rule: StragglerRule, attempt: int, step: int, busy_s: Mapping[int, Sequence[float]], nodes: Mapping[int, str]
) -> tuple[Verdict, ...]:
    """The ranks that are slow. busy_s: the last times of each rank, of which those with fewer than `num_steps` are not
    judged. nodes: of ranks, where known. Told once for a rank in an attempt.
    """
    own = {rank: median(times[-rule.num_steps :]) for rank, times in busy_s.items() if len(times) >= rule.num_steps}
    if len(own) < 2:
        return ()
    usual = median_low(own.values())
    limit = max(rule.factor * usual, usual + rule.floor_s)
    return tuple(
        Verdict(
            Kind.STRAGGLER,
            attempt,
            step,
            step,
            f"rank {rank} works {taken:.4g} s a step, the median rank {usual:.4g} s",
            0,
            rank,
            nodes.get(rank, ""),
        )
        for rank, taken in sorted(own.items())
        if taken > limit
    )
