"""How long a section of a rank's work may take, learned from how long it took before: pure.

A section is a phase by name (a step, an evaluation). Its fixed deadline must hold for every job and is therefore long;
once enough of a job's own sections have been seen, a far shorter one is safe: `factor` times their 99th percentile, but
`floor_s` at least, by when the hang is told: so it is late a little before. The fixed deadline stays the upper bound.
Durations are kept as counts in buckets of equal ratio, so that they cost the same after a million steps, and those of
several nodes add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

BUCKETS_PER_OCTAVE = 32
RATIO = 2.0 ** (1.0 / BUCKETS_PER_OCTAVE)
SHORTEST_S = 1e-3
# What waits for a service (a plan, a commit) may take as long as the service is away: its fixed deadline alone counts.
LEARNED = frozenset({"step", "evaluation"})


@dataclass(frozen=True, slots=True)
class Durations:
    """Past durations of one section. counts: by bucket; bucket b holds those in (upper_s(b - 1), upper_s(b)]."""

    counts: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))

    @staticmethod
    def of(durations_s: Iterable[float]) -> Durations:
        counts: dict[int, int] = {}
        for duration_s in durations_s:
            bucket = bucket_of(duration_s)
            counts[bucket] = counts.get(bucket, 0) + 1
        return Durations(MappingProxyType(counts))

    @property
    def num_samples(self) -> int:
        return sum(self.counts.values())

    def __add__(self, other: Durations) -> Durations:
        buckets = self.counts.keys() | other.counts.keys()
        return Durations(
            MappingProxyType({each: self.counts.get(each, 0) + other.counts.get(each, 0) for each in buckets})
        )

    def plus(self, duration_s: float) -> Durations:
        """With one more."""
        bucket = bucket_of(duration_s)
        return Durations(MappingProxyType({**self.counts, bucket: self.counts.get(bucket, 0) + 1}))

    def quantile_s(self, quantile: float) -> float:
        """A duration that at least this share of the samples did not exceed: never below the true quantile, and at most
        RATIO times it (or SHORTEST_S). There must be samples.
        """
        assert self.counts and 0.0 < quantile <= 1.0
        wanted = math.ceil(quantile * self.num_samples)
        for bucket in sorted(self.counts):
            wanted -= self.counts[bucket]
            if wanted <= 0:
                return upper_s(bucket)
        raise AssertionError("the counts add up")


@dataclass(frozen=True, slots=True)
class Rule:
    """When a section is late. min_samples: before so many, the fixed deadline alone counts. late_at: the part of the
    allowance after which it is; the rest is for the stacks, the buckets' width and the telling.
    """

    min_samples: int = 20
    floor_s: float = 10.0
    factor: float = 3.0
    quantile: float = 0.99
    late_at: float = 0.95
    learned: frozenset[str] = LEARNED


@dataclass(frozen=True, slots=True)
class Allowance:
    """How long a section may take. num_samples: what it was learned from; 0: it is the fixed deadline. limit_s: None
    where there is none.
    """

    limit_s: float | None
    num_samples: int = 0


def allowance(rule: Rule, name: str, past: Durations, fixed_s: float | None) -> Allowance:
    """How long the section `name` may take. past: its durations so far in this attempt or job, over all ranks. fixed_s:
    its fixed deadline; None (a debugger is at work) leaves it without one.
    """
    if fixed_s is None or name not in rule.learned or past.num_samples < rule.min_samples:
        return Allowance(fixed_s)
    learned_s = rule.late_at * max(rule.floor_s, rule.factor * past.quantile_s(rule.quantile))
    return Allowance(learned_s, past.num_samples) if learned_s < fixed_s else Allowance(fixed_s)


def bucket_of(duration_s: float) -> int:
    """The bucket that holds `duration_s`; all up to SHORTEST_S share bucket 0."""
    if duration_s <= SHORTEST_S:
        return 0
    bucket = math.ceil(BUCKETS_PER_OCTAVE * math.log2(duration_s / SHORTEST_S))
    return bucket if duration_s <= upper_s(bucket) else bucket + 1  # the logarithm is rounded


def upper_s(bucket: int) -> float:
    """The longest duration that a bucket holds."""
    return float(SHORTEST_S * RATIO**bucket)
