"""Curves: each step once, as the newest attempt did it; stored in pieces; thinned without losing what matters."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.monitor.curve import PIECE_STEPS, Curve, StepFigures, pieces_of, rows_from, rows_of, thinned


def figures(step: int, attempt: int = 1, loss: float = 2.0) -> StepFigures:
    return StepFigures(step, loss, 1000.0, 1.0, 0.5, 0.01, 3e-4, attempt)


def curve_of(steps, attempt=1):
    curve = Curve()
    for step in steps:
        curve.put(figures(step, attempt))
    return curve


def test_curve_later_attempt_replaces_what_an_earlier_one_did_from_its_first_step_on():
    curve = curve_of(range(1, 101))
    assert curve.put(figures(61, attempt=2))
    assert len(curve) == 61 and curve.last_step == 61
    assert curve.rows["attempt"].tolist() == [1] * 60 + [2]


def test_curve_step_of_an_older_attempt_is_refused_where_a_newer_one_has_it():
    curve = curve_of(range(1, 11))
    curve.put(figures(6, attempt=2))
    assert not curve.put(figures(6, attempt=1, loss=9.0))
    assert curve.rows["loss"].tolist() == [2.0] * 6


def test_curve_same_step_of_the_same_attempt_stands_once():
    curve = curve_of([1, 2, 3])
    curve.put(figures(2, loss=7.0))
    assert curve.rows["step"].tolist() == [1, 2, 3]
    assert curve.rows["loss"].tolist() == [2.0, 7.0, 2.0]


def test_curve_step_that_comes_late_finds_its_place():
    curve = curve_of([1, 2, 5, 3])
    assert curve.rows["step"].tolist() == [1, 2, 3, 5]
    assert not curve.has_all(1, 5) and curve.has_all(1, 3)


def test_curve_fill_adds_only_missing_steps():
    curve = curve_of([1, 2, 5])
    rows = rows_from({"step": np.arange(1, 8), "loss": np.full(7, 9.0), "attempt": np.full(7, 1)}, 7)
    assert curve.fill(rows) == 3
    assert curve.rows["loss"].tolist() == [2.0, 2.0, 9.0, 9.0, 2.0, 9.0, 9.0]
    assert curve.fill(rows) is None


def test_curve_one_more_step_rewrites_one_piece():
    curve = curve_of(range(1, 3 * PIECE_STEPS))
    first, pieces = curve.take_unsaved()
    assert (first, sorted(pieces)) == (0, [0, 1, 2])
    assert curve.is_saved and curve.take_unsaved() is None
    curve.put(figures(3 * PIECE_STEPS - 1, loss=1.0))
    first, pieces = curve.take_unsaved()
    assert (first, list(pieces)) == (2, [2])


def test_curve_cut_makes_stored_pieces_behind_it_disappear():
    curve = curve_of(range(1, 3 * PIECE_STEPS))
    curve.take_unsaved()
    assert curve.cut(PIECE_STEPS + 5)
    first, pieces = curve.take_unsaved()
    assert (first, list(pieces)) == (1, [1])
    assert rows_of(pieces.values())["step"].tolist() == list(range(PIECE_STEPS, PIECE_STEPS + 6))
    assert not curve.cut(PIECE_STEPS + 5)


def test_pieces_give_the_same_rows_bit_for_bit_not_finite_ones_included():
    rows = rows_from({"step": np.array([1, 2, 5000]), "loss": np.array([1.5, math.nan, math.inf])}, 3)
    assert rows_of(pieces_of(rows).values()).tobytes() == rows.tobytes()


def test_pieces_that_are_damaged_are_an_error():
    with pytest.raises(ValueError):
        rows_of([__import__("zlib").compress(b"abc")])


def test_curve_of_a_million_steps_is_cheap_to_extend_and_to_save():
    steps = np.arange(1, 1_000_001)
    curve = Curve(rows_from({"step": steps, "loss": np.random.default_rng(0).normal(2, 0.1, len(steps))}, len(steps)))
    began_s = time.perf_counter()
    for step in range(1_000_001, 1_001_001):
        curve.put(figures(step))
        curve.take_unsaved()
    assert (time.perf_counter() - began_s) / 1000 < 0.05, "at most a twentieth of a second a step, saved each time"
    assert len(thinned(curve.rows, 2000)) <= 2000


losses = st.lists(st.one_of(st.floats(0, 100), st.just(math.nan), st.just(math.inf)), min_size=1, max_size=400)


@given(losses, st.integers(1, 50))
def test_thinned_rows_are_few_ascending_and_keep_ends_and_extremes(values, max_points):
    rows = rows_from({"step": np.arange(1, len(values) + 1), "loss": np.array(values)}, len(values))
    kept = thinned(rows, max_points)
    assert 1 <= len(kept) <= max(max_points, 1)
    assert (np.diff(kept["step"]) > 0).all()
    assert kept["step"][-1] == len(values)
    if max_points >= 4:
        assert kept["step"][0] == 1
        whole = np.where(np.isfinite(rows["loss"]), rows["loss"], np.inf)
        shown = np.where(np.isfinite(kept["loss"]), kept["loss"], np.inf)
        assert shown.min() == whole.min() and shown.max() == whole.max()


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4)), max_size=80))
def test_curve_is_what_the_newest_attempt_at_each_step_did(puts):
    """Against a plain model: a dict of steps, cut where a later attempt does a step again."""
    curve, model = Curve(), {}
    for step, attempt in puts:
        standing = min((each for each in model if each >= step), default=None)
        if standing is not None and model[standing] > attempt:
            assert not curve.put(figures(step, attempt))
            continue
        if standing is not None and model[standing] < attempt:
            model = {each: by for each, by in model.items() if each < step}
        model[step] = attempt
        assert curve.put(figures(step, attempt))
    assert dict(zip(curve.rows["step"].tolist(), curve.rows["attempt"].tolist(), strict=True)) == dict(
        sorted(model.items())
    )
