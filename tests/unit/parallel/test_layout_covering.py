"""The generated table of layouts covers each pair of settings that may stand together, and says why others may not."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.covering import Pair, Refusal, Value, covering, pairs_in, pairs_of

FOLDER = Path(__file__).resolve().parents[2] / "distributed" / "parallel"


@pytest.fixture(scope="module")
def axes_of_layouts() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import layout_axes

        yield layout_axes
    sys.modules.pop("layout_axes", None)


@st.composite
def spaces(draw: st.DrawFn) -> tuple[dict[str, list[int]], list[tuple[frozenset[tuple[str, int]], str]]]:
    """A few small axes, and combinations of two or three values that can't be."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=3, max_size=5))
    axes = {f"axis{i}": list(range(size)) for i, size in enumerate(sizes)}
    singles = st.sampled_from(sorted((axis, value) for axis, values in axes.items() for value in values))
    combination = st.frozensets(singles, min_size=1, max_size=3)
    wrong = draw(st.lists(combination.filter(lambda c: len(dict(c)) == len(c)), max_size=8))
    return axes, [(each, f"rule {number}") for number, each in enumerate(wrong)]


@given(spaces())
def test_covering_is_that_of_brute_force(
    space: tuple[dict[str, list[int]], list[tuple[frozenset[tuple[str, int]], str]]],
) -> None:
    axes, wrong = space

    def refuse(choice: Mapping[str, Value]) -> Refusal | None:
        for combination, reason in wrong:
            if combination <= choice.items():
                return Refusal(reason, frozenset(axis for axis, _ in combination))
        return None

    allowed = [
        choice
        for values in itertools.product(*axes.values())
        if refuse(choice := dict(zip(axes, values, strict=True))) is None
    ]
    possible: set[Pair] = {pair for choice in allowed for pair in pairs_in(choice)}
    found = covering(axes, refuse)
    assert all(row in allowed for row in found.rows)
    assert {pair for row in found.rows for pair in pairs_in(row)} == possible
    told = {pair for pair in pairs_of(axes) if found.refused_values.keys() & set(pair)} | found.refused_pairs.keys()
    assert told == set(pairs_of(axes)) - possible
    assert found == covering(axes, refuse), "the same at each run"


def test_rules_that_name_no_axis_are_told() -> None:
    with pytest.raises(AssertionError, match="follows from nothing: closed"):
        covering({"a": [1, 2], "b": [1, 2]}, lambda _: Refusal("closed", frozenset()))


def test_pairs_of_layouts_are_covered_or_refused_with_the_reason_of_spec(axes_of_layouts: ModuleType) -> None:
    axes, found = axes_of_layouts.AXES, axes_of_layouts.layouts()
    covered = {pair for row in found.rows for pair in pairs_in(row)}
    refused = {p for p in pairs_of(axes) if found.refused_values.keys() & set(p)} | found.refused_pairs.keys()
    assert covered | refused == set(pairs_of(axes)) and not covered & refused
    assert all(axes_of_layouts.refusal_of(row) is None for row in found.rows)
    assert found.refused_values.keys() == {("attn_backend", "flex")}, "all else can be in some layout"
    zero3_zbv = found.refused_pairs[("schedule", "zbv"), ("zero", 3)]
    assert zero3_zbv.reason.startswith("parallel.zero is 3: expected 1 with the schedule zbv")


def test_layouts_have_at_most_eight_ranks_and_some_of_each_number(axes_of_layouts: ModuleType) -> None:
    sizes = {axes_of_layouts.world_size_of(row) for row in axes_of_layouts.layouts().rows}
    assert max(sizes) == 8 and {1, 4, 6, 8} <= sizes


def test_narrow_layouts_may_be_computed_in_fp32_too(axes_of_layouts: ModuleType) -> None:
    for row in axes_of_layouts.layouts().rows:
        assert axes_of_layouts.refusal_of(axes_of_layouts.in_fp32(row)) is None
