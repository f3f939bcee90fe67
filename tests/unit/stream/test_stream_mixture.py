"""The mixture: exact counts over every period, each window of each source once and in its order, the same whenever and
however it is asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.stream.apportion import Apportionment, floor_sum, normalised
from phalanx.stream.interleave import first_counts, place, places_of, tree_of
from phalanx.stream.mixture import EXACT_STEPS, NOWHERE, Change, Limit, Mixture
from phalanx.stream.view import View

SLOW = settings(deadline=None, max_examples=25)

weights = st.lists(st.integers(0, 1000), min_size=1, max_size=6).filter(any)
decimals = st.lists(st.decimals("0", "1", places=6).map(Fraction), min_size=2, max_size=6).filter(any)


def mixture_of(*stages: tuple[int, Sequence[int]], period: int = 100, **more: object) -> Mixture:
    changes = [Change(position, tuple(map(Fraction, parts)), period) for position, parts in stages]
    return Mixture(changes, start=changes[0].position, **more)  # type: ignore[arg-type]


@st.composite
def staged(draw: st.DrawFn) -> tuple[Mixture, int]:
    """A mixture of a few stretches with sources that may run out, and how many positions it is looked at."""
    num_sources = draw(st.integers(1, 5))
    parts = st.lists(st.integers(0, 20), min_size=num_sources, max_size=num_sources).filter(any)
    positions = sorted(draw(st.lists(st.integers(1, 350), max_size=3)))
    start = draw(st.integers(0, 50))
    stages = [(start, draw(parts)), *((start + position, draw(parts)) for position in positions)]
    limit = st.builds(Limit, st.none() | st.integers(0, 150), st.booleans())
    first = draw(st.lists(st.integers(0, 100), min_size=num_sources, max_size=num_sources))
    limits = [draw(limit) for _ in range(num_sources)]
    mixture = mixture_of(*stages, period=draw(st.integers(9, 120)), first=first, limits=limits)
    return mixture, start + 450


def stop_of(mixture: Mixture, stop: int) -> int:
    return stop if mixture.end is None else min(stop, mixture.end)


@given(staged())
@SLOW
def test_mixture_gives_each_window_of_each_source_once_and_in_order(found: tuple[Mixture, int]) -> None:
    mixture, stop = found
    positions = np.arange(mixture.start, stop_of(mixture, stop))
    sources, windows = mixture.place(positions)
    first = mixture.counts(mixture.start)
    for source in range(mixture.num_sources):
        mine = windows[sources == source]
        assert np.array_equal(mine, first[source] + np.arange(len(mine)))
    assert mixture.counts(int(positions[-1]) + 1 if len(positions) else mixture.start) == tuple(
        first[source] + int((sources == source).sum()) for source in range(mixture.num_sources)
    )


@given(staged())
@SLOW
def test_mixture_place_and_its_inverse_are_the_identity(found: tuple[Mixture, int]) -> None:
    mixture, stop = found
    positions = np.arange(mixture.start, stop_of(mixture, stop))
    sources, windows = mixture.place(positions)
    for source in range(mixture.num_sources):
        mine = sources == source
        assert np.array_equal(mixture.positions(source, windows[mine]), positions[mine])
        asked = np.arange(0, 300)
        back = mixture.positions(source, asked)
        known = back != NOWHERE
        again, window = mixture.place(back[known])
        assert (again == source).all() and np.array_equal(window, asked[known])


@given(staged(), st.randoms())
@SLOW
def test_mixture_asked_in_any_order_and_in_parts_says_the_same(found: tuple[Mixture, int], draw) -> None:
    mixture, stop = found
    positions = np.arange(mixture.start, stop_of(mixture, stop))
    whole = np.stack(mixture.place(positions))
    order = draw.sample(range(len(positions)), len(positions))
    parts = [np.array(order[start : start + 97], dtype=int) for start in range(0, len(order), 97)]
    for part in parts:
        assert np.array_equal(np.stack(mixture.place(positions[part])), whole[:, part])


@given(staged())
@SLOW
def test_source_that_runs_out_gives_all_its_windows_and_no_more(found: tuple[Mixture, int]) -> None:
    mixture, stop = found
    for out in mixture.ran_out:
        limit = mixture._limits[out.source]
        assert limit.windows is not None
        at = stop_of(mixture, out.position)
        most = max(limit.windows, mixture.counts(mixture.start)[out.source])
        assert mixture.counts(at)[out.source] == most
        assert mixture.counts(stop_of(mixture, max(stop, at)))[out.source] == most
        if limit.stops:
            assert mixture.end == out.position
        elif mixture.end is None or out.position < mixture.end:
            assert mixture.weights_at(out.position)[out.source] == 0


@given(weights | decimals, st.integers(1, 40))
@SLOW
def test_counts_over_every_thousand_batches_are_within_one_window_of_the_weights(
    parts: list[Fraction], batch: int
) -> None:
    period, start = EXACT_STEPS * batch, 24
    shares = normalised(parts)
    mixture = Mixture([Change(start, tuple(map(Fraction, parts)), period)], start=start)
    counts = np.array([mixture.counts(start + number * period) for number in range(60)])
    assert (counts.sum(axis=1) == np.arange(60) * period).all()
    for share, column in zip(shares, counts.T.tolist(), strict=True):
        assert all(abs(b - a - share * period) < 1 for a, b in pairwise(column))
        assert all(abs(count - share * number * period) < 4 for number, count in enumerate(column))


@given(weights | decimals, st.integers(0, 10**9), st.integers(1, 3000))
@SLOW
def test_counts_of_periods_add_up_in_closed_form(parts: list[Fraction], number: int, period: int) -> None:
    dealt = Apportionment(normalised(parts), period)
    before, within, after = dealt.before(number), dealt.within(number), dealt.before(number + 1)
    assert tuple(a + b for a, b in zip(before, within, strict=True)) == after
    assert sum(before) == number * period and sum(within) == period and min(within) >= 0


@given(st.integers(0, 60), st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_floor_sum_is_the_sum_of_floors(count: int, divisor: int, slope: int, offset: int) -> None:
    assert floor_sum(count, divisor, slope, offset) == sum((slope * i + offset) // divisor for i in range(count))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any))
@SLOW
def test_period_is_smooth_everywhere(counts: list[int]) -> None:
    tree, total = tree_of(normalised(list(map(Fraction, counts)))), sum(counts)
    sources, numbers = place(tree, counts, np.arange(total))
    for source, count in enumerate(counts):
        mine = np.flatnonzero(sources == source)
        assert np.array_equal(numbers[mine], np.arange(count))
        assert np.array_equal(places_of(tree, counts, source, np.arange(count)), mine) if count else not len(mine)
        so_far = np.cumsum(sources == source)
        ideal = np.arange(1, total + 1) * count / total
        assert np.abs(so_far - ideal).max() < 2
    length = total // 3
    assert first_counts(tree, counts, length) == tuple(int((sources[:length] == s).sum()) for s in range(len(counts)))


def test_tiny_weight_is_read_in_its_turn() -> None:
    mixture = mixture_of((0, (9999, 1)), period=1000)
    counts = [mixture.counts(position)[1] for position in range(0, 101_000, 1000)]
    assert counts[-1] == 10 and {b - a for a, b in pairwise(counts)} == {0, 1}
    assert max(abs(count - number / 10) for number, count in enumerate(counts)) < 2


def test_change_of_weights_moves_nothing_before_it() -> None:
    before = mixture_of((0, (7, 2, 1)))
    after = mixture_of((0, (7, 2, 1)), (430, (1, 1, 1)), (431, (0, 0, 5)))
    positions = np.arange(430)
    assert np.array_equal(np.stack(before.place(positions)), np.stack(after.place(positions)))
    sources, windows = after.place(np.arange(431, 460))
    assert (sources == 2).all() and windows[0] == after.counts(431)[2]


def test_single_dataset_is_the_identity() -> None:
    mixture, positions = Mixture(), np.array([5, 0, 10**15])
    sources, windows = mixture.place(positions)
    assert not sources.any() and np.array_equal(windows, positions)
    assert mixture.counts(77) == (77,) and mixture.end is None and mixture.num_sources == 1


def test_place_far_away_costs_what_one_nearby_does() -> None:
    mixture = Mixture([Change(0, tuple(Fraction(k, 991) for k in (3, 171, 817)), 4_096_000)])
    batch = np.arange(4096)

    def seconds(first: int) -> float:
        started = time.perf_counter()
        sources, windows = mixture.place(batch + first)
        for source in range(3):
            mine = sources == source
            assert np.array_equal(mixture.positions(source, windows[mine]), batch[mine] + first)
        return time.perf_counter() - started

    assert min(seconds(4_096_000 * number * 10**6) for number in range(5)) < 0.1


def test_sources_that_all_run_out_end_what_there_is() -> None:
    mixture = mixture_of((0, (1, 1)), limits=[Limit(10), Limit(30)])
    assert mixture.end == 40 and [out.source for out in mixture.ran_out] == [0, 1]
    assert mixture.counts(10**9) == (10, 30)
    assert mixture.positions(1, np.array([29, 30])).tolist() == [39, NOWHERE]
    assert mixture_of((0, (1, 1)), limits=[Limit(0), Limit(0)]).end == 0


def test_source_that_stops_ends_what_there_is_unless_its_weight_is_taken_before() -> None:
    limits = [Limit(10, stops=True), Limit()]
    assert mixture_of((0, (1, 1)), limits=limits).end == 21
    spared = mixture_of((0, (1, 1)), (18, (0, 1)), limits=limits)
    assert spared.end is None and not spared.ran_out
    again = mixture_of((0, (1, 1)), (20, (0, 1)), (30, (1, 1)), limits=limits)
    assert again.end == 30 and again.counts(30) == (10, 20)


def test_view_takes_out_positions_and_windows_of_a_source_and_cuts_the_targets_before_them() -> None:
    mixture = mixture_of((0, (1, 1)))
    positions = np.arange(40)
    sources, windows = mixture.place(positions)
    view = View(mixture, [(4, 6)], {1: [(7, 9)]})
    expected = ((positions >= 4) & (positions < 6)) | ((sources == 1) & (windows >= 7) & (windows < 9))
    assert np.array_equal(view.left_out(positions), expected)
    gone = {(int(s), int(w)) for s, w, out in zip(sources, windows, expected, strict=True) if out}
    cut = [(int(s), int(w) + 1) in gone for s, w in zip(sources, windows, strict=True)]
    assert view.next_left_out(positions).tolist() == cut


@pytest.mark.parametrize("source", [0, 1, 2])
def test_inverse_knows_no_window_of_a_source_that_is_read_no_more(source: int) -> None:
    mixture = mixture_of((0, (1, 1, 1)), (300, (1, 1, 0)))
    back = mixture.positions(source, np.array([0, 99, 100, 5000]))
    assert (back[:2] < 300).all() and (back[2:] == NOWHERE).all() == (source == 2)
