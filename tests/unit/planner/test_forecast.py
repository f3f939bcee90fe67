"""A run's days, interruptions and cost from the time of its step."""

from __future__ import annotations

import pytest

from phalanx.planner.forecast import assumptions, forecast, recovery_of
from phalanx.planner.prices import load_prices

GIVEN = {
    "gpu": "H100-80",
    "gpus": 4096,
    "peak_tflops": 989,
    "step_s": 20.0,
    "tokens_per_step": 16_777_216,
    "steps": 100_000,
    "flops_per_token": 2.5e12,
    "checkpoint_steps": 100,
    "state_bytes": 1.2e10,
    "prices": load_prices(),
}


def test_forecast_counts_days_interruptions_and_dollars():
    found = forecast(**GIVEN)
    assert found.tokens_per_s == pytest.approx(16_777_216 / 20)
    assert found.mfu == pytest.approx(2.5e12 * 16_777_216 / 20 / (4096 * 989e12))
    assert found.mtbf_h == pytest.approx(4 * 3.093, rel=0.01)
    assert 0.9 < found.ettr < found.best_ettr < 1
    assert found.cost is not None and found.cost.training_days == pytest.approx(100_000 * 20 / 86_400)
    assert found.cost.wall_days == pytest.approx(found.cost.training_days / found.ettr)


def test_a_kind_without_a_price_leaves_the_rest_of_the_forecast():
    found = forecast(**{**GIVEN, "gpu": "MI300X-192"})
    assert found.cost is None and found.unpriced is not None and "[gpu.MI300X]" in found.unpriced
    assert found.ettr == forecast(**GIVEN).ettr


def test_the_best_interval_is_never_shorter_than_a_step():
    found = forecast(**{**GIVEN, "step_s": 3000.0, "steps": 10})
    assert found.best_interval_s == 3000.0


def test_recovery_scales_with_what_a_gpu_stores():
    small, large = recovery_of(1e9, 100.0), recovery_of(1e10, 100.0)
    assert large.checkpoint_s == pytest.approx(10 * small.checkpoint_s) and large.restore_s == 10 * small.restore_s
    assert small.detect_s == large.detect_s


def test_assumptions_say_whose_failure_rates_are_taken():
    assert len(assumptions("H100-80")) == len(assumptions("A100-80")) == 1
    assert "rates of the H100" in assumptions("B200-192")[1]


def test_an_interval_beyond_the_run_is_the_run():
    whole = forecast(**{**GIVEN, "steps": 200, "checkpoint_steps": 200})
    assert forecast(**{**GIVEN, "steps": 200, "checkpoint_steps": 99_999_999}) == whole
    assert whole.recovery.interval_s == 200 * 20


@pytest.mark.parametrize(
    ("changed", "said"), [({"checkpoint_steps": 10**8}, "more often"), ({"step_s": 1e9}, "not even")]
)
def test_a_run_that_failures_leave_no_time_never_finishes(changed, said):
    found = forecast(**{**GIVEN, **changed})
    assert not found.finishes and found.cost is None and 0 <= found.ettr < 1e-3
    assert found.unpriced is not None and "never finishes" in found.unpriced and said in found.unpriced
