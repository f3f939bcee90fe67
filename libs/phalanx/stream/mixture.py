"""Which window of which source lies at a position of a job that reads several sources by weight; pure.

A window belongs wholly to one source and is the next one of that source's own endless stream (`Order`). Weights hold
from a position on: a *stretch* lies between two such changes, or begins where a source has run out. From the start of a
stretch on, periods of `period` windows (1,000 global batches) give each source its weight times the period, to within
one window (`apportion`), and inside a period each is spread evenly (`interleave`). Everything is closed form: a
position costs the same wherever it lies, and so does the inverse.

A source with `limit` runs out after that many windows. From the position on that would have taken one more, its weight
is shared by the others in proportion, or, where it `stops`, there is nothing more to read: `end`.

Without a change there is one source, and its windows are the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.stream import interleave
from phalanx.stream.apportion import Apportionment, normalised

Int64: TypeAlias = NDArray[np.int64]

EXACT_STEPS: Final = 1000  # global batches in which counts are exact to within one window
NOWHERE: Final = -1
MAX_PERIOD: Final = 1_500_000_000  # products of two counts of a period fit int64
_KEPT_PERIODS: Final = 64


@dataclass(frozen=True, slots=True)
class Change:
    """From window `position` on the sources have these weights (any numbers of 0 or more, not all 0), exact to within
    one window over every `period` windows.
    """

    position: int
    weights: tuple[Fraction, ...]
    period: int


@dataclass(frozen=True, slots=True)
class Limit:
    """windows: how many a source has to give, None for no end; stops: whether nothing more is read once it has run
    out, instead of the others taking its share.
    """

    windows: int | None = None
    stops: bool = False


@dataclass(frozen=True, slots=True)
class RanOut:
    """A source that has no window left: the position that would have taken the next one."""

    source: int
    position: int


class Mixture:
    """Where the windows of `num_sources` sources lie.

    changes: sorted by position, none before the start; the first at `start`. None at all is the single source whose
    windows are the positions. first: windows of each source that were read before `start` (a fork goes on with its
    origin's sources). limits: by source.
    """

    def __init__(
        self,
        changes: Sequence[Change] = (),
        *,
        start: int = 0,
        first: Sequence[int] | None = None,
        limits: Sequence[Limit] | None = None,
    ) -> None:
        self.num_sources = len(changes[0].weights) if changes else 1
        self._is_identity = not changes
        self.start = start
        given = tuple(first) if first is not None else (0,) * self.num_sources
        self._limits = tuple(limits) if limits is not None else (Limit(),) * self.num_sources
        assert len(given) == len(self._limits) == self.num_sources
        self.end: int | None = None
        self.ran_out: tuple[RanOut, ...] = ()
        self._starts = np.zeros(0, np.int64)
        if self._is_identity:
            return
        assert changes[0].position == start
        assert all(early.position <= late.position for early, late in pairwise(changes))
        self._first = given
        self._stretches = self._stretched(changes)
        self._starts = np.array([stretch.start for stretch in self._stretches], np.int64)
        self._given = np.array([stretch.given for stretch in self._stretches], np.int64).reshape(-1, self.num_sources)

    def place(self, positions: Int64) -> tuple[Int64, Int64]:
        """Source and window (on the source's own stream) at each position, int64 [n] each.

        positions: int64 [n], at or after `start` and before `end`, in any order.
        """
        if self._is_identity:
            return np.zeros_like(positions), positions.copy()
        assert not len(positions) or (positions.min() >= self.start and positions.max() < (self.end or _FOREVER))
        sources, windows = np.empty_like(positions), np.empty_like(positions)
        stretch_of = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(stretch_of).tolist():
            rows = np.flatnonzero(stretch_of == number)
            sources[rows], windows[rows] = self._stretches[number].place(positions[rows])
        return sources, windows

    def positions(self, source: int, windows: Int64) -> Int64:
        """The inverse of `place`: positions of windows of `source`, int64 [n]; NOWHERE for those that are never read,
        as this mixture stands, and for those before the start.
        """
        if self._is_identity:
            return windows.copy()
        found = np.full_like(windows, NOWHERE)
        # Stretches in which the source stands still begin with the count of the next one: the last of them is taken.
        stretch_of = np.searchsorted(self._given[:, source], windows, side="right") - 1
        for number in np.unique(stretch_of[stretch_of >= 0]).tolist():
            stretch = self._stretches[number]
            if stretch.weights[source]:
                rows = np.flatnonzero(stretch_of == number)
                found[rows] = stretch.positions(source, windows[rows])
        return found if self.end is None else np.where(found < self.end, found, NOWHERE)

    def counts(self, position: int) -> tuple[int, ...]:
        """Windows of each source before `position`: where their streams stand."""
        if self._is_identity:
            return (position,)
        if self.end is not None:
            position = min(position, self.end)
        assert position >= self.start
        if not self._stretches:
            return self._first
        return self._stretches[int(np.searchsorted(self._starts, position, side="right")) - 1].counts(position)

    def standing(self, position: int) -> tuple[int, tuple[int, ...], Change] | None:
        """Start of the stretch that holds `position`, windows of each source before it, and the change whose weights
        it goes by: what another mixture needs to go on in the same way. None where nothing is read there.
        """
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        if self._is_identity or number < 0 or (self.end is not None and position >= self.end):
            return None
        stretch = self._stretches[number]
        return stretch.start, stretch.given, stretch.change

    def weights_at(self, position: int) -> tuple[Fraction, ...]:
        """The parts of each source from `position` on, which sum to 1: a source that has run out has none."""
        if self._is_identity:
            return (Fraction(1),)
        return self._stretches[int(np.searchsorted(self._starts, position, side="right")) - 1].weights

    def _stretched(self, changes: Sequence[Change]) -> list[_Stretch]:
        """The stretches up to the end of what there is to read; sets `end` and `ran_out`."""
        stretches: list[_Stretch] = []
        given, last = self._first, len(changes) - 1
        for number, change in enumerate(changes):
            start, until = change.position, _FOREVER if number == last else changes[number + 1].position
            while start < until:
                stretch = self._stretch_at(start, change, given)
                if stretch is None:
                    self.end = start
                    return stretches
                stretches.append(stretch)
                start, given = self._go_on(stretch, until)
                if self.end is not None:
                    return stretches
        return stretches

    def _stretch_at(self, start: int, change: Change, given: tuple[int, ...]) -> _Stretch | None:
        """The stretch that begins at `start`, or None where no source with a weight has anything left, or one that
        `stops` has not.
        """
        left = list(change.weights)
        for source, (count, limit) in enumerate(zip(given, self._limits, strict=True)):
            if not left[source] or limit.windows is None or count < limit.windows:
                continue
            left[source] = Fraction(0)
            if all(source != out.source for out in self.ran_out):
                self.ran_out += (RanOut(source, start),)
            if limit.stops:
                return None
        return _Stretch(start, given, normalised(left), change) if any(left) else None

    def _go_on(self, stretch: _Stretch, until: int) -> tuple[int, tuple[int, ...]]:
        """Where a stretch is over, `until` at the latest, and the counts there. A source that `stops` ends it all."""
        ends = {
            source: stretch.position_of(source, limit.windows)
            for source, limit in enumerate(self._limits)
            if limit.windows is not None and stretch.weights[source]
        }
        stop = min([until, *ends.values()])
        out = [source for source, position in ends.items() if position == stop and stop < until]
        self.ran_out += tuple(RanOut(source, stop) for source in out)
        if any(self._limits[source].stops for source in out):
            self.end = stop
        return stop, stretch.counts(stop) if stop < _FOREVER else stretch.given


_FOREVER: Final = 1 << 62


class _Stretch:
    """Windows from `start` on, under weights that sum to 1. given: windows of each source before it; change: where the
    weights come from.
    """

    def __init__(self, start: int, given: tuple[int, ...], weights: tuple[Fraction, ...], change: Change) -> None:
        assert 0 < change.period <= MAX_PERIOD
        self.start, self.given, self.weights, self.change = start, given, weights, change
        self.period = change.period
        self._apportionment = Apportionment(weights, self.period)
        self._tree = interleave.tree_of(weights)
        self._period = lru_cache(maxsize=_KEPT_PERIODS)(self._read_period)

    def _read_period(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Windows of each source before period `number`, and in it."""
        before = self._apportionment.before(number)
        return tuple(a + b for a, b in zip(self.given, before, strict=True)), self._apportionment.within(number)

    def place(self, positions: Int64) -> tuple[Int64, Int64]:
        """As `Mixture.place`."""
        numbers, places = np.divmod(positions - self.start, self.period)
        sources, windows = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            before, within = self._period(number)
            sources[rows], index = interleave.place(self._tree, within, places[rows])
            windows[rows] = np.array(before, np.int64)[sources[rows]] + index
        return sources, windows

    def positions(self, source: int, windows: Int64) -> Int64:
        """As `Mixture.positions`, for windows that this stretch, were it endless, holds."""
        found = np.empty_like(windows)
        order = np.argsort(windows, kind="stable")
        done = 0
        while done < len(order):
            number = self._period_of(source, int(windows[order[done]]))
            before, within = self._period(number)
            behind = before[source] + within[source]
            stop = int(np.searchsorted(windows, behind, sorter=order))
            rows = order[done:stop]
            places = interleave.places_of(self._tree, within, source, windows[rows] - before[source])
            found[rows] = self.start + number * self.period + places
            done = stop
        return found

    def position_of(self, source: int, window: int) -> int:
        """Of one window; beyond any number a job reaches it is only said to be far."""
        if window - self.given[source] > _FAR * self.weights[source]:
            return _FOREVER
        return int(self.positions(source, np.array([window], np.int64))[0])

    def counts(self, position: int) -> tuple[int, ...]:
        """Windows of each source before a position of this stretch."""
        number, place = divmod(position - self.start, self.period)
        before, within = self._period(number)
        inside = interleave.first_counts(self._tree, within, place)
        return tuple(a + b for a, b in zip(before, inside, strict=True))

    def _period_of(self, source: int, window: int) -> int:
        """The period that holds a window of `source`: the last one before which there are no more than `window`."""
        low = int((window - self.given[source]) / (self.weights[source] * self.period))
        high, width = low + 1, 1
        while low > 0 and self._period(low)[0][source] > window:
            low, width = max(0, low - width), 2 * width
        width = 1
        while self._period(high)[0][source] <= window:
            high, width = high + width, 2 * width
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._period(middle)[0][source] <= window else (low, middle)
        return low


_FAR: Final = 1 << 58
