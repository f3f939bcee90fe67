"""The loss rules: what they find, what they leave alone, and how often they are wrong on noise."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.monitor.rules import Action, Kind, Policy, Verdict
from phalanx.monitor.rules.loss import LossRule, LossState, LossStep, judged

RULE = LossRule()


def verdicts(losses, rule=RULE, first_step=1, attempt=1):
    state, found = LossState(), []
    for step, loss in enumerate(losses, first_step):
        state, new = judged(rule, state, LossStep(attempt, step, loss))
        found += new
    return found


def curve(noise: random.Random, num: int, spread: float = 0.02):
    return [1.7 + 9.0 / step**0.5 + noise.gauss(0, spread) for step in range(1, num + 1)]


def test_nan_is_told_in_its_own_step():
    found = verdicts([2.0] * 10 + [math.nan] + [2.0] * 10)
    assert [(each.kind, each.first_step, each.last_step) for each in found] == [(Kind.NAN, 11, 11)]


def test_nan_step_that_is_told_twice_is_judged_once():
    state, first = judged(RULE, LossState(), LossStep(1, 5, math.nan, is_finite=False))
    _, second = judged(RULE, state, LossStep(1, 5, math.nan))
    assert len(first) == 1 and second == ()


def test_nan_gradient_with_a_finite_loss_is_told():
    _, found = judged(RULE, LossState(), LossStep(1, 5, 2.0, is_finite=False))
    assert [each.kind for each in found] == [Kind.NAN]


def test_nan_in_a_row_becomes_one_divergence_and_then_silence():
    found = verdicts([2.0] * 5 + [math.nan] * 1000)
    assert [each.kind for each in found] == [Kind.NAN] * 10 + [Kind.DIVERGENCE]
    assert (found[2].first_step, found[2].last_step) == (6, 8), "from the third on the whole row"
    assert (found[-1].first_step, found[-1].last_step) == (6, 15)


def test_spike_is_told_at_its_third_raised_step_from_its_first():
    losses = curve(random.Random(0), 600)
    losses[500:520] = [loss * 1.5 for loss in losses[500:520]]
    found = verdicts(losses)
    assert [(each.kind, each.first_step, each.last_step) for each in found] == [(Kind.SPIKE, 501, 503)]


def test_spike_of_one_or_two_steps_is_none():
    losses = curve(random.Random(0), 600)
    losses[300] *= 3
    losses[500:502] = [5.0, 5.0]
    assert verdicts(losses) == []


def test_spike_before_the_warm_up_is_none():
    losses = curve(random.Random(0), 200)
    losses[30:40] = [50.0] * 10
    assert verdicts(losses) == []


def test_spike_that_stays_becomes_the_new_level_and_is_told_once():
    losses = [2.0 + random.Random(1).gauss(0, 0.01) for _ in range(300)] + [2.3] * 900
    found = [each for each in verdicts(losses) if each.kind is Kind.SPIKE]
    assert [each.first_step for each in found] == [301]


def test_spikes_apart_are_told_apart():
    losses = curve(random.Random(2), 1200)
    for start in (500, 900):
        losses[start : start + 5] = [6.0] * 5
    assert [each.first_step for each in verdicts(losses)] == [501, 901]


def test_divergence_of_a_slow_climb_is_told_once():
    noise = random.Random(3)
    losses = curve(noise, 1000)
    losses += [losses[-1] + 0.0006 * step + noise.gauss(0, 0.02) for step in range(2000)]
    found = verdicts(losses)
    assert [each.kind for each in found] == [Kind.DIVERGENCE]
    assert 1000 < found[0].first_step < found[0].last_step < 1800


def test_divergence_that_came_back_may_be_told_again():
    level = [2.0] * 300
    climb = [2.4] * 400
    found = [each for each in verdicts(level + climb + level + climb) if each.kind is Kind.DIVERGENCE]
    assert len(found) == 2


@pytest.mark.parametrize("kind", ["normal", "heavy_tails", "correlated"])
def test_false_alarms_on_noise_are_rarer_than_one_in_a_hundred_thousand_steps(kind):
    """Falling curves with noise of 0.02 (1 % of the loss): normal; Student's t with 3 degrees of freedom; and
    autocorrelated with 0.9.
    """
    noise, found, num_curves = random.Random(f"seed of {kind}"), 0, 20
    for _ in range(num_curves):
        drift, losses = 0.0, []
        for step in range(1, 5001):
            if kind == "normal":
                by = noise.gauss(0, 0.02)
            elif kind == "heavy_tails":
                by = 0.02 * noise.gauss(0, 1) / math.sqrt(noise.gammavariate(1.5, 2 / 3))
            else:
                by = drift = 0.9 * drift + noise.gauss(0, 0.02 * math.sqrt(1 - 0.81))
            losses.append(1.7 + 9.0 / step**0.5 + by)
        found += len(verdicts(losses))
    assert found == 0, f"{found} false alarms in {num_curves * 5000} steps"


def test_spikes_of_thirty_percent_are_found_always():
    noise = random.Random(5)
    for _ in range(20):
        losses = curve(noise, 1000)
        start = noise.randrange(300, 900)
        losses[start : start + 10] = [loss * 1.3 for loss in losses[start : start + 10]]
        assert [(each.kind, each.first_step) for each in verdicts(losses)] == [(Kind.SPIKE, start + 1)]


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=120))
def test_judged_is_the_same_whether_steps_come_once_or_again(losses):
    once, state, found = verdicts(losses), LossState(), []
    for step, loss in enumerate(losses, 1):
        for _ in range(2):
            state, new = judged(RULE, state, LossStep(1, step, loss))
            found += new
    assert found == once


@given(st.lists(st.one_of(st.floats(0.1, 100), st.just(math.nan)), max_size=150))
def test_judged_tells_each_incident_under_an_id_of_its_own(losses):
    ids = [each.id("projects/p/jobs/j") for each in verdicts(losses)]
    assert len(ids) == len(set(ids))


@given(st.floats(0.5, 20), st.integers(0, 2**16))
def test_level_curves_never_alarm_whatever_their_level(level, seed):
    noise = random.Random(seed)
    assert verdicts([level * (1 + noise.gauss(0, 0.003)) for _ in range(400)]) == []


def verdict(kind, first=5, last=5):
    return Verdict(kind, 1, first, last, "", first)


def test_policy_defaults_skip_nan_restart_hangs_and_tell_the_rest():
    policy = Policy.of(object())
    assert policy.action(verdict(Kind.NAN)) is Action.SKIP
    assert policy.action(verdict(Kind.HANG)) is Action.RESTART
    for kind in (Kind.SPIKE, Kind.DIVERGENCE, Kind.STRAGGLER, Kind.GPU_FAULT):
        assert policy.action(verdict(kind)) is Action.NOTIFY


def test_policy_of_a_job_file_is_read_by_its_keys():
    class Recovery:
        on_nan, on_spike, on_divergence, on_hang = "roll_back", "skip", "roll_back", "notify"

    policy = Policy.of(Recovery())
    assert policy.action(verdict(Kind.SPIKE)) is Action.SKIP
    assert policy.action(verdict(Kind.DIVERGENCE)) is Action.ROLL_BACK
    assert policy.action(verdict(Kind.HANG)) is Action.NOTIFY


def test_policy_rolls_back_for_steps_in_a_row_and_not_for_a_single_one():
    policy = Policy(on_nan=Action.ROLL_BACK)
    assert policy.action(verdict(Kind.NAN)) is Action.NOTIFY
    assert policy.action(verdict(Kind.NAN, 5, 7)) is Action.ROLL_BACK


def test_policy_with_an_action_that_the_key_cannot_have_is_an_error():
    class Recovery:
        on_spike = "restart"

    with pytest.raises(ValueError, match="on_spike"):
        Policy.of(Recovery())
