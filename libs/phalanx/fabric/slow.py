"""Which pairs of ranks are slow among the others: a rule on times alone. Pure.

Every pair is measured in several sweeps, far apart from each other, and the least time of all its messages is its
figure: what else runs on a machine makes some messages late, a bad link all of them. A link that loses packets is one
of those: a long message is many packets.

The reference is the lower quartile over the pairs: so it is that of a good pair still where one rank's pairs, half of
all with 4 ranks, are slow. A pair is slow when its figure is above `FACTOR` times the reference (`SHARED_FACTOR` for
ranks without GPUs, which share processors) and above the reference by `SPREADS` times the spread of the faster half of
the pairs (1.4826 times the median distance from the reference, which is the standard deviation where values are normal;
Rousseeuw and Croux, J. Am. Stat. Assoc. 88, 1993).

A rank whose pairs are all slow is named instead of them. Where more than `TIER` of the other pairs are slow, they are
no exception but another kind of link (other sockets, other switches): they are compared among themselves, by the same
rule.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from phalanx.fabric.figures import lower_quartile, median

Pair = tuple[int, int]
FACTOR, SHARED_FACTOR = 2.0, 3.0
SPREADS = 6.0
TIER = 1 / 3
_NORMAL = 1.4826
# Three ranks have three pairs: the least that can tell which of them is unlike the others.
LEAST_RANKS = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """pairs: the slow ones that no slow rank explains. ranks: those all of whose pairs are slow. reference: figure of a
    good pair; limit: above which a pair is slow.
    """

    pairs: tuple[Pair, ...]
    ranks: tuple[int, ...]
    reference: float
    limit: float


def judge(figures: Mapping[Pair, float], factor: float = FACTOR) -> Verdict:
    """figures: time of each pair, any unit. Every pair of the ranks must be there; with fewer than LEAST_RANKS ranks no
    pair can be told from the others, and none is named. factor: FACTOR, or SHARED_FACTOR for ranks without GPUs.
    """
    all_ranks = {rank for pair in figures for rank in pair}
    reference, limit = _limit(figures, factor)
    if len(all_ranks) < LEAST_RANKS:
        return Verdict((), (), reference, limit)
    slow = {pair for pair, value in figures.items() if value > limit}
    ranks = tuple(rank for rank in sorted(all_ranks) if _all_slow(rank, all_ranks, slow))
    others = {pair: value for pair, value in figures.items() if not set(pair) & set(ranks)}
    return Verdict(tuple(sorted(_exceptions(others, limit, factor))), ranks, reference, limit)


def _limit(figures: Mapping[Pair, float], factor: float) -> tuple[float, float]:
    """Figure of a good pair, and above which one is slow."""
    ordered = sorted(figures.values())
    reference = lower_quartile(ordered)
    faster_half = ordered[: max(1, len(ordered) // 2)]
    spread = _NORMAL * median([abs(value - reference) for value in faster_half])
    return reference, max(factor * reference, reference + SPREADS * spread)


def _exceptions(figures: Mapping[Pair, float], limit: float, factor: float) -> list[Pair]:
    """The pairs above the limit; where they are too many for that, those that are slow among them."""
    slow = {pair: value for pair, value in figures.items() if value > limit}
    if len(slow) <= TIER * len(figures):
        return list(slow)
    return _exceptions(slow, _limit(slow, factor)[1], factor)


def _all_slow(rank: int, ranks: Collection[int], pairs: Collection[Pair]) -> bool:
    return all((min(rank, other), max(rank, other)) in pairs for other in ranks if other != rank)
