"""From the ranks' events to the report."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from phalanx.fabric.plan import NUM_SWEEPS, Plan
from phalanx.fabric.report import report_of
from phalanx.gang import Event
from phalanx.spec import Layout

PLAN = Plan(Layout(dp_shard=2, tp=2), "cpu", (1000, 4000), ("all_reduce",))


def event(kind: str, rank: int, **fields: Any) -> Event:
    return Event(rank, kind, fields, 0.0)


def measured(axis: str, num_bytes: int, groups: dict[tuple[int, ...], float], operation: str = "all_reduce") -> Any:
    for ranks, time_s in groups.items():
        for rank in ranks:
            times_s = [time_s * 0.9 if rank == ranks[0] else time_s] * 3 + [1.0]
            yield event(
                "measured", rank, axis=axis, operation=operation, num_bytes=num_bytes, ranks=ranks, times_s=times_s
            )


def collectives() -> list[Event]:
    groups = {
        "dp_shard": {(0, 2): 1e-3, (1, 3): 2e-3},
        "tp": {(0, 1): 5e-3, (2, 3): 1e-3},
        "world": {(0, 1, 2, 3): 8e-3},
    }
    return [each for axis, of in groups.items() for size in PLAN.sizes for each in measured(axis, size, of)]


def pairs(slow: dict[tuple[int, int], float]) -> list[Event]:
    return [
        event("pair", a, ranks=[a, b], sweep=sweep, latency_s=slow.get((a, b), 1e-4) * (1 + sweep), time_s=1e-3)
        for sweep in range(NUM_SWEEPS)
        for a, b in itertools.combinations(range(4), 2)
    ]


def test_slowest_rank_of_the_slowest_group_counts_by_its_median() -> None:
    report = report_of(PLAN, collectives())
    first = report.measurements[0]
    assert (first.axis, first.num_bytes, first.slowest, first.iterations) == ("dp_shard", 1000, (1, 3), 4)
    assert first.time_s == 2e-3 and report.of("tp", "all_reduce") == {1000: 5e-3, 4000: 5e-3}
    last = report.measurements[-1]
    assert last.num_ranks == 4 and last.algorithm_gb_s == pytest.approx(4000 / 8e-3 / 1e9)
    assert last.bus_gb_s == pytest.approx(last.algorithm_gb_s * 1.5)


def test_pairs_count_by_their_best_sweep() -> None:
    report = report_of(PLAN, collectives() + pairs({}))
    assert [each.latency_s for each in report.pairs] == [1e-4] * 6
    assert report.pairs[0].gb_s == pytest.approx((1 << 20) / 1e-3 / 1e9)
    assert report.slow_pairs == () and report.slow_ranks == ()
    assert report.said() == ("no pair is slow (a good pair: 100 us one way, 1 ms for 1 MiB)",)


def test_slow_pair_and_slow_rank_are_said() -> None:
    report = report_of(PLAN, pairs({(1, 3): 2e-3}))
    assert report.slow_pairs == ((1, 3),) and report.slow_ranks == ()
    (said,) = report.said()
    assert said.startswith("the pair of ranks 1 and 3 is slow: 2 ms one way, 1 ms for 1 MiB")
    report = report_of(PLAN, pairs(dict.fromkeys([(0, 2), (1, 2), (2, 3)], 2e-3)))
    assert report.slow_ranks == (2,) and report.slow_pairs == ()
    assert report.said()[0].startswith("rank 2 is slow: all its pairs are")


def test_ring_and_tree_are_compared_where_both_were_measured() -> None:
    events = []
    for size in PLAN.sizes:
        events += measured("world", size, {(0, 1, 2, 3): 60e-6 + size * 1e-9}, "all_reduce_ring")
        events += measured("world", size, {(0, 1, 2, 3): 58e-6 + size * 2e-9}, "all_reduce_tree")
    report = report_of(PLAN, events)
    assert report.crossings["world"].num_bytes == 2000
    assert [(axis, operation) for axis, operation, _ in report.lines()] == [
        ("world", "all_reduce_ring"),
        ("world", "all_reduce_tree"),
    ]
    assert report_of(PLAN, collectives()).crossings == {}


def test_without_pairs_nothing_is_said_of_them() -> None:
    report = report_of(PLAN, collectives())
    assert report.by_latency is None and report.said() == () and report.slow_pairs == ()


def test_two_ranks_are_said_to_have_nothing_to_compare_with() -> None:
    two = Plan(Layout(dp_shard=2), "cpu", (4,), ("all_reduce",))
    events = [event("pair", 0, ranks=[0, 1], sweep=0, latency_s=1e-4, time_s=1e-3)]
    (said,) = report_of(two, events).said()
    assert said.startswith("2 ranks are one pair, and there is no other to compare it with")
