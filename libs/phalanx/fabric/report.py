"""What the ranks' events say: times and bandwidths of each collective over each axis, ring beside tree, the pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.fabric.figures import Crossing, Line, algorithm_gb_s, bus_factor, crossing, fit, median, time_text
from phalanx.fabric.plan import BY_HAND, LONG_BYTES, OPERATIONS, Plan, axes_of, axis_sizes
from phalanx.fabric.slow import FACTOR, LEAST_RANKS, SHARED_FACTOR, Pair, Verdict, judge
from phalanx.gang import Event


@dataclass(frozen=True, slots=True)
class Measurement:
    """One operation of one size over an axis. time_s: of the slowest group, whose slowest rank counts, by the median of
    its iterations: a step of training waits for them. slowest: the ranks of that group. Bandwidths in 10^9 bytes a
    second.
    """

    axis: str
    operation: str
    num_bytes: int
    num_ranks: int
    time_s: float
    iterations: int
    slowest: tuple[int, ...]

    @property
    def algorithm_gb_s(self) -> float:
        return algorithm_gb_s(self.num_bytes, self.time_s)

    @property
    def bus_gb_s(self) -> float:
        return self.algorithm_gb_s * bus_factor(self.operation, self.num_ranks)


@dataclass(frozen=True, slots=True)
class PairFigure:
    """latency_s: of a short message one way, time_s: of one of LONG_BYTES; each the least of all sweeps."""

    ranks: Pair
    latency_s: float
    time_s: float
    gb_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """All of one run. crossings: by axis. by_latency, by_time: None where no pairs were measured."""

    plan: Plan
    measurements: tuple[Measurement, ...]
    pairs: tuple[PairFigure, ...]
    crossings: Mapping[str, Crossing]
    by_latency: Verdict | None
    by_time: Verdict | None

    def of(self, axis: str, operation: str) -> dict[int, float]:
        """Seconds by bytes."""
        found = (each for each in self.measurements if (each.axis, each.operation) == (axis, operation))
        return {each.num_bytes: each.time_s for each in found}

    def line(self, axis: str, operation: str) -> Line | None:
        """Latency and bandwidth of an operation; None where fewer than two sizes were measured."""
        times_s = self.of(axis, operation)
        return fit(times_s) if len(times_s) >= 2 else None

    def lines(self) -> list[tuple[str, str, Line]]:
        """Axis, operation and its line, of the operations of which at least two sizes were measured."""
        keys = dict.fromkeys((each.axis, each.operation) for each in self.measurements)
        found = [(axis, operation, self.line(axis, operation)) for axis, operation in keys]
        return [(axis, operation, line) for axis, operation, line in found if line is not None]

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        """Ranks all of whose pairs are slow, by either figure."""
        return tuple(sorted({rank for verdict in self._verdicts for rank in verdict.ranks}))

    @property
    def slow_pairs(self) -> tuple[Pair, ...]:
        """Slow pairs by either figure, but those of slow ranks."""
        named = set(self.slow_ranks)
        found = {pair for verdict in self._verdicts for pair in verdict.pairs}
        return tuple(sorted(pair for pair in found if not named & set(pair)))

    def said(self) -> tuple[str, ...]:
        """The verdict on the pairs, a sentence for each rank and pair that is slow; nothing where none was measured."""
        if self.by_latency is None or self.by_time is None:
            return ()
        latency, time = time_text(self.by_latency.reference), time_text(self.by_time.reference)
        good = f"a good pair: {latency} one way, {time} for 1 MiB"
        if self.plan.world_size < LEAST_RANKS:
            return (f"2 ranks are one pair, and there is no other to compare it with ({good})",)
        by_pair = {each.ranks: each for each in self.pairs}
        found = [f"rank {rank} is slow: all its pairs are ({good})" for rank in self.slow_ranks]
        for pair in self.slow_pairs:
            mine = by_pair[pair]
            took = f"{time_text(mine.latency_s)} one way, {time_text(mine.time_s)} for 1 MiB"
            found.append(f"the pair of ranks {pair[0]} and {pair[1]} is slow: {took} ({good})")
        return tuple(found) or (f"no pair is slow ({good})",)

    @property
    def _verdicts(self) -> list[Verdict]:
        return [verdict for verdict in (self.by_latency, self.by_time) if verdict is not None]


def report_of(plan: Plan, events: Iterable[Event]) -> Report:
    """The report of a run that went to its end."""
    told = [event for event in events if event.kind in ("measured", "pair")]
    measurements = tuple(_measurements(plan, [event for event in told if event.kind == "measured"]))
    pairs = tuple(_pairs([event for event in told if event.kind == "pair"]))
    bare = Report(plan, measurements, pairs, {}, None, None)
    if not pairs:
        return Report(plan, measurements, pairs, _crossings(bare), None, None)
    factor = SHARED_FACTOR if plan.device == "cpu" else FACTOR
    return Report(
        plan,
        measurements,
        pairs,
        _crossings(bare),
        judge({each.ranks: each.latency_s for each in pairs}, factor),
        judge({each.ranks: each.time_s for each in pairs}, factor),
    )


def _measurements(plan: Plan, events: list[Event]) -> Iterable[Measurement]:
    by_key: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for event in events:
        fields = event.fields
        by_key.setdefault((fields["axis"], fields["operation"], fields["num_bytes"]), []).append(fields)
    for axis, operation, num_bytes in itertools.product(axes_of(plan.layout), (*OPERATIONS, *BY_HAND), plan.sizes):
        if (axis, operation, num_bytes) not in by_key:
            continue
        slowest = max(by_key[axis, operation, num_bytes], key=lambda fields: median(fields["times_s"]))
        yield Measurement(
            axis,
            operation,
            num_bytes,
            len(slowest["ranks"]),
            median(slowest["times_s"]),
            len(slowest["times_s"]),
            tuple(slowest["ranks"]),
        )


def _pairs(events: list[Event]) -> Iterable[PairFigure]:
    by_pair: dict[Pair, list[Event]] = {}
    for event in events:
        a, b = event.fields["ranks"]
        by_pair.setdefault((a, b), []).append(event)
    for pair, sweeps in sorted(by_pair.items()):
        time_s = min(event.fields["time_s"] for event in sweeps)
        latency_s = min(event.fields["latency_s"] for event in sweeps)
        yield PairFigure(pair, latency_s, time_s, algorithm_gb_s(LONG_BYTES, time_s))


def _crossings(report: Report) -> dict[str, Crossing]:
    found = {}
    for axis in dict.fromkeys(each.axis for each in report.measurements):
        ring, tree = report.of(axis, "all_reduce_ring"), report.of(axis, "all_reduce_tree")
        if len(ring) >= 2 and tree:
            num_ranks = axis_sizes(report.plan.layout).get(axis, report.plan.world_size)
            found[axis] = crossing(ring, tree, num_ranks)
    return found
