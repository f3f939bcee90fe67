"""A table of choices in which every pair of values that may stand together does so in some row.

Which choices are refused is asked of a function, so that rules are written down once, where they hold. A refusal names
the axes that it follows from: whatever is allowed differs from a refused choice on one of those, which is what makes
the search for a pair's row complete. Rows grow greedily, each value by how many new pairs it brings (after Cohen et
al., "The AETG system", 1997), in an order that a fixed seed draws: the table is the same at each run.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Value = str | int | float | bool | None
Choice = dict[str, Value]
Pair = tuple[tuple[str, Value], tuple[str, Value]]
# Choices that the search for one row looks at before it gives up.
MOST_TRIED = 20_000


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a choice can't be, and the axes that this follows from."""

    reason: str
    axes: frozenset[str]


Refuse = Callable[[Mapping[str, Value]], Refusal | None]


@dataclass(frozen=True, slots=True)
class Covering:
    """rows: choices of a value for every axis. refused: values that can't be at all and, of the others, pairs that can
    only be apart, each with why.
    """

    rows: list[Choice]
    refused_values: dict[tuple[str, Value], Refusal]
    refused_pairs: dict[Pair, Refusal]


def covering(axes: Mapping[str, Sequence[Value]], refuse: Refuse) -> Covering:
    """axes: each one's values, the usual one first. refuse: None for a choice that is allowed.

    Raises AssertionError where a pair is undecided after `MOST_TRIED` choices, or a refusal names no axis.
    """
    return _Search(axes, refuse).run()


def pairs_of(axes: Mapping[str, Sequence[Value]]) -> Iterator[Pair]:
    """Every pair of values of two axes, whether it may be or not."""
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(axes[one], axes[other]):
            yield (one, pair[0]), (other, pair[1])


def pairs_in(choice: Mapping[str, Value]) -> Iterable[Pair]:
    """The pairs that one row covers, in the order of its axes."""
    return itertools.combinations(choice.items(), 2)


@dataclass
class _Search:
    axes: Mapping[str, Sequence[Value]]
    refuse: Refuse
    covered: set[Pair] = field(default_factory=set)
    known: dict[tuple[Value, ...], Refusal | None] = field(default_factory=dict)

    def run(self) -> Covering:
        usual = {axis: values[0] for axis, values in self.axes.items()}
        found = Covering([], {}, {})
        for axis, value in ((axis, value) for axis, values in self.axes.items() for value in values):
            if isinstance(refusal := self.completed({axis: value}, usual), Refusal):
                found.refused_values[axis, value] = refusal
        for pair in pairs_of(self.axes):
            if pair in self.covered or any(single in found.refused_values for single in pair):
                continue
            row = self.completed(dict(pair), usual)
            if isinstance(row, Refusal):
                found.refused_pairs[pair] = row
                continue
            row = self.grown(row, dict(pair), random.Random(len(found.rows)))
            found.rows.append(row)
            self.covered.update(pairs_in(row))
        return found

    def grown(self, row: Choice, fixed: Choice, order: random.Random) -> Choice:
        """`row` with one axis after the other set to what covers most beside what is `fixed`."""
        for axis in order.sample(sorted(self.axes.keys() - fixed.keys()), len(self.axes) - len(fixed)):
            for value in self.wanted(axis, fixed, row):
                completed = self.completed({**fixed, axis: value}, row)
                if not isinstance(completed, Refusal):
                    row, fixed = completed, {**fixed, axis: value}
                    break
        return row

    def wanted(self, axis: str, fixed: Mapping[str, Value], row: Mapping[str, Value]) -> list[Value]:
        """The values of an axis, best first; of equals the one that `row` has."""
        return sorted(self.axes[axis], key=lambda value: (-self.gain(axis, value, fixed), value != row[axis]))

    def gain(self, axis: str, value: Value, fixed: Mapping[str, Value]) -> int:
        places = {name: place for place, name in enumerate(self.axes)}
        own = (axis, value)
        pairs = (sorted((own, other), key=lambda single: places[single[0]]) for other in fixed.items())
        return sum((one, other) not in self.covered for one, other in pairs)

    def completed(self, fixed: Mapping[str, Value], start: Mapping[str, Value]) -> Choice | Refusal:
        """The allowed choice with the values of `fixed` that is nearest to `start`, or why there is none."""
        first = {**start, **fixed}
        queue, seen, met = deque([first]), {tuple(first.values())}, []
        while queue:
            choice = queue.popleft()
            refusal = self.asked(choice)
            if refusal is None:
                return choice
            assert refusal.axes, f"a refusal that follows from nothing: {refusal.reason}"
            met.append(refusal)
            for axis in sorted(refusal.axes - fixed.keys()):
                for value in self.axes[axis]:
                    changed = {**choice, axis: value}
                    if (key := tuple(changed.values())) not in seen:
                        seen.add(key)
                        queue.append(changed)
            assert len(seen) <= MOST_TRIED, f"undecided: {fixed}"
        # The one that says most of what is fixed; of equals the last, which was met where others were avoided.
        return min(reversed(met), key=lambda refusal: len(fixed.keys() - refusal.axes))

    def asked(self, choice: Mapping[str, Value]) -> Refusal | None:
        key = tuple(choice.values())
        if key not in self.known:
            self.known[key] = self.refuse(choice)
        return self.known[key]
