"""Failure rates, checkpoint intervals and effective training time: formulas against each other and against what large
runs have published."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.planner.goodput import Spread, draw_run, drawn_interval_s, outlook
from phalanx.planner.reliability import (
    A100_QUIET_RATES,
    A100_RATES,
    DEFAULT_RATES,
    H100_RATES,
    HOUR_S,
    Component,
    FailureRates,
    Recovery,
    best_interval_s,
    daly_interval_s,
    expected_ettr,
    first_order_ettr,
    one_node_rate,
    rates_for,
    young_interval_s,
)

# A large run that saves in the background: 20 s of pause, durable a minute later, back within seven minutes.
BIG = Recovery(650, 20, durable_s=60, detect_s=60, restart_s=300, restore_s=60)


def test_54_days_on_16384_gpus_meet_the_published_interruptions():
    # Grattafiori et al. 2024, section 3.3.4: 419 unexpected interruptions, 78 % of them hardware, effective training
    # time above 90 %. Table 5: 58.7 % faults of GPUs and their memory, 8.4 % of network switches and cables.
    assert H100_RATES.mtbf_h(16_384) == pytest.approx(54 * 24 / 419, rel=1e-3)
    found = outlook(H100_RATES, 16_384, 54, BIG, runs=40)
    assert found.interruptions.mean == pytest.approx(419, rel=0.05)
    assert found.interruptions.low < 419 < found.interruptions.high
    by_gpu = found.by_component["gpu"] + found.by_component["gpu memory"]
    assert by_gpu / found.interruptions.mean == pytest.approx(0.64, rel=0.1)
    assert found.by_component["network"] == pytest.approx(35, rel=0.1)
    assert found.ettr.mean > 0.9


def test_a_run_of_months_is_drawn_in_well_under_a_second():
    started = time.process_time()
    draw_run(H100_RATES, 16_384, 54, BIG)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_mean_time_to_failure_of_large_jobs_is_the_published_projection(gpus, hours):
    # Kokolis et al. 2025, section III: projected from 6.50 failures in a thousand node-days.
    assert A100_RATES.mtbf_h(gpus) == pytest.approx(hours, rel=0.03)


@pytest.mark.parametrize(
    ("gpus", "rates", "interval_min", "restart_min", "pause_s", "published"),
    [(16_384, 6.50, 60, 5, 0, 0.70), (16_384, 6.50, 5, 5, 0, 0.93), (100_000, 2.34, 2, 2, 5, 0.90)],
)
def test_effective_time_of_large_jobs_is_the_published_estimate(
    gpus, rates, interval_min, restart_min, pause_s, published
):
    # The same paper's section III: hourly checkpoints against five minutes; what 100,000 GPUs need for 0.9.
    nodes, interval_s, restart_s = gpus // 8, 60.0 * interval_min, 60.0 * restart_min
    estimate = first_order_ettr(
        nodes, rates / 1000, restart_s=restart_s, interval_s=interval_s, checkpoint_s=float(pause_s)
    )
    assert estimate == pytest.approx(published, rel=0.05)
    plan = Recovery(interval_s, pause_s, restart_s=restart_s)
    exact = expected_ettr(plan, one_node_rate(rates).mtbf_h(gpus) * HOUR_S)
    assert exact == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize("gpus", [2048, 4096])
def test_hourly_checkpoints_keep_nine_tenths_of_middling_jobs(gpus):
    assert first_order_ettr(gpus // 8, 6.5e-3, restart_s=300, interval_s=3600) > 0.9


def test_rates_of_a_kind_of_gpu_fall_back_to_those_counted_best():
    assert rates_for("A100-80") is A100_RATES and rates_for("h100") is H100_RATES
    assert rates_for("B200-192") is DEFAULT_RATES
    assert A100_QUIET_RATES.mtbf_h(1024) > H100_RATES.mtbf_h(1024) > A100_RATES.mtbf_h(1024)


@pytest.mark.parametrize(("checkpoint_s", "mtbf_s"), [(5, 11_000), (60, 11_000), (600, 11_000), (300, 1500)])
def test_best_interval_is_what_simulation_finds(checkpoint_s, mtbf_s):
    best = best_interval_s(checkpoint_s, mtbf_s)
    assert drawn_interval_s(Recovery(1, checkpoint_s), mtbf_s) == pytest.approx(best, rel=0.03)


@given(st.floats(0.1, 3000), st.floats(0.5, 1e6))
def test_best_interval_beats_its_neighbours_and_dalys_comes_close(checkpoint_s, mtbf_s):
    def ettr(interval):
        return expected_ettr(Recovery(interval, checkpoint_s), mtbf_s)

    best = best_interval_s(checkpoint_s, mtbf_s)
    assert 0 < best <= mtbf_s * (1 + 1e-9)
    if checkpoint_s < 100 * mtbf_s:
        assert ettr(best) >= max(ettr(best * 0.95), ettr(best * 1.05)) * (1 - 1e-9)
    if checkpoint_s < mtbf_s / 10:
        assert daly_interval_s(checkpoint_s, mtbf_s) == pytest.approx(best, rel=0.002)
        assert best < young_interval_s(checkpoint_s, mtbf_s)


@pytest.mark.parametrize(
    "plan",
    [
        BIG,
        dataclasses.replace(BIG, interval_s=3000, durable_s=0),
        dataclasses.replace(BIG, restart_s=3000, restore_s=900, detect_s=600),
    ],
)
def test_drawn_runs_have_the_expected_effective_time(plan):
    mtbf_s = H100_RATES.mtbf_h(16_384) * HOUR_S
    drawn = outlook(H100_RATES, 16_384, 400, plan, runs=10, seed=3)
    assert drawn.ettr.mean == pytest.approx(expected_ettr(plan, mtbf_s), rel=0.01)


@settings(deadline=None, max_examples=40)
@given(
    st.floats(0.01, 60),
    st.integers(0, 1000),
    st.builds(
        Recovery,
        st.floats(10, 20_000),
        st.floats(0, 300),
        *[st.floats(0, 2000)] * 4,
        st.one_of(st.none(), st.integers(0, 4)),
        st.floats(0, 1e6),
    ),
)
def test_ledger_accounts_for_every_second(days, seed, plan):
    drawn = draw_run(H100_RATES, 16_384, days, plan, seed)
    assert drawn.wall_s == pytest.approx(days * 86_400)
    assert drawn == draw_run(H100_RATES, 16_384, days, plan, seed)
    assert min(drawn.training_s, drawn.lost_s, drawn.waiting_s) >= 0
    if plan.spares is None:
        assert drawn.waiting_s == 0


def test_runs_without_spares_wait_for_repair_and_each_spare_helps():
    plans = [dataclasses.replace(BIG, spares=spares, repair_s=2 * 86_400.0) for spares in (0, 4, 16, 64)]
    found = [outlook(H100_RATES, 16_384, 54, plan, runs=5).ettr.mean for plan in plans]
    assert found == sorted(found) and found[0] < 0.3 and found[-1] > 0.88


def test_a_run_that_nothing_interrupts_only_pays_for_its_checkpoints():
    calm = FailureRates((Component("node", "node", 0.0),))
    assert math.isinf(calm.mtbf_h(8))
    plan = Recovery(90, 10)
    assert draw_run(calm, 8, 1, plan).ettr == pytest.approx(0.9) == expected_ettr(plan, math.inf)


def test_spread_leaves_out_a_twentieth_on_each_side():
    assert Spread.of([float(each) for each in range(101)]) == Spread(50.0, 5.0, 95.0)


@pytest.mark.parametrize(
    "act",
    [
        lambda: Recovery(0, 1),
        lambda: Recovery(10, -1),
        lambda: Recovery(10, 1, spares=-1),
        lambda: H100_RATES.mtbf_h(0),
        lambda: draw_run(H100_RATES, 8, 0, BIG),
    ],
)
def test_plans_that_cannot_be_are_refused(act):
    with pytest.raises(PhalanxError):
        act()


@pytest.mark.parametrize("factor", [1.0, 1e3, 1e6, 1e12, 1e300])
def test_time_kept_falls_to_nothing_without_an_overflow(factor):
    longer = dataclasses.replace(BIG, interval_s=BIG.interval_s * factor)
    slower = dataclasses.replace(BIG, restore_s=BIG.restore_s * factor, durable_s=BIG.durable_s * factor)
    for each in (longer, slower):
        assert 0 <= expected_ettr(each, 3600.0) <= expected_ettr(BIG, 3600.0)
