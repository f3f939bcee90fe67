"""How long a section may take, learned from its past."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.gang.sections import RATIO, SHORTEST_S, Allowance, Durations, Rule, allowance, bucket_of, upper_s

RULE = Rule()
seconds = st.floats(0.0, 1e6)
samples = st.lists(seconds, min_size=1, max_size=200)


@given(seconds)
def test_bucket_holds_its_duration_and_the_one_below_does_not(duration_s):
    bucket = bucket_of(duration_s)
    assert duration_s <= upper_s(bucket)
    assert bucket == 0 or duration_s > upper_s(bucket - 1)


@given(samples, st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_quantile_is_never_below_the_true_one_and_at_most_a_bucket_above(durations_s, quantile):
    true_s = sorted(durations_s)[math.ceil(quantile * len(durations_s)) - 1]
    found_s = Durations.of(durations_s).quantile_s(quantile)
    assert true_s <= found_s <= max(SHORTEST_S, true_s * RATIO * (1 + 1e-9))


@given(samples, samples)
def test_durations_of_two_nodes_add_up_in_any_order(one, other):
    assert Durations.of(one) + Durations.of(other) == Durations.of([*other, *one])


@given(samples)
def test_durations_taken_one_by_one_are_the_same(durations_s):
    past = Durations()
    for duration_s in durations_s:
        past = past.plus(duration_s)
    assert past == Durations.of(durations_s) and past.num_samples == len(durations_s)


@given(samples, st.floats(1e-3, 1e6))
def test_allowance_lies_between_floor_and_fixed_deadline(durations_s, fixed_s):
    allowed = allowance(RULE, "step", Durations.of(durations_s), fixed_s)
    assert allowed.limit_s <= fixed_s
    if len(durations_s) < RULE.min_samples:
        assert allowed == Allowance(fixed_s)
    if allowed.num_samples:
        promised_s = max(RULE.floor_s, RULE.factor * sorted(durations_s)[math.ceil(0.99 * len(durations_s)) - 1])
        assert RULE.late_at * promised_s <= allowed.limit_s <= 0.971 * promised_s  # time is left to tell it


@given(st.lists(seconds, min_size=20, max_size=60), st.floats(0.0, 1e5))
def test_allowance_of_slower_sections_is_never_shorter(durations_s, more_s):
    slower = [duration_s + more_s for duration_s in durations_s]
    one, other = (allowance(RULE, "step", Durations.of(each), 1e9) for each in (durations_s, slower))
    assert one.limit_s <= other.limit_s


def test_allowance_without_a_fixed_deadline_is_none():
    assert allowance(RULE, "step", Durations.of([1.0] * 100), None) == Allowance(None)


@pytest.mark.parametrize("name", ["plan", "save", "restore", "init", "first_step", "import"])
def test_allowance_of_a_section_that_may_wait_for_others_is_its_fixed_deadline(name):
    assert allowance(RULE, name, Durations.of([0.01] * 100), 600.0) == Allowance(600.0)


def test_allowance_rare_slow_step_beyond_the_99th_percentile_does_not_stretch_it():
    assert allowance(RULE, "step", Durations.of([1.0] * 199 + [500.0]), 600.0) == Allowance(9.5, 200)
