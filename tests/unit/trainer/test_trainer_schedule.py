"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.spec.training import LrScheduler
from phalanx.trainer.schedule import learning_rate_factor


@dataclass(frozen=True, slots=True)
class Section:
    """`[lr_scheduler]`."""

    warmup_steps: int = 4
    total_steps: int = 20
    decay_type: str = "cosine"
    min_lr_factor: float = 0.1
    stable_steps: int = 0

    @property
    def decay_steps(self) -> int:
        """As `LrScheduler` has it."""
        return self.total_steps - self.warmup_steps - self.stable_steps


def test_warm_up_rises_in_equal_steps_to_the_peak() -> None:
    assert [learning_rate_factor(step, Section()) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_no_warm_up_starts_with_the_first_step_of_the_decay() -> None:
    expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 20))
    assert learning_rate_factor(1, Section(warmup_steps=0)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("decay_type", "middle"), [("cosine", 0.55), ("linear", 0.55), ("none", 1.0)])
def test_decay_at_its_middle_is_half_way_down(decay_type: str, middle: float) -> None:
    assert learning_rate_factor(12, Section(decay_type=decay_type)) == pytest.approx(middle, rel=1e-12)


@pytest.mark.parametrize("decay_type", ["cosine", "linear", "sqrt"])
def test_decay_falls_each_step_and_stays_at_its_floor_past_the_end(decay_type: str) -> None:
    factors = [learning_rate_factor(step, Section(decay_type=decay_type)) for step in range(4, 31)]
    falling, floor = factors[:17], factors[16:]
    assert falling == sorted(falling, reverse=True) and len(set(falling)) == len(falling)
    assert floor == pytest.approx([0.1] * len(floor), rel=1e-12)


def test_cosine_differs_from_linear_where_it_should() -> None:
    early = {name: learning_rate_factor(8, Section(decay_type=name)) for name in ("cosine", "linear")}
    assert early["linear"] == pytest.approx(0.775)
    assert early["cosine"] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize(
    ("decay_type", "half"), [("linear", 0.55), ("cosine", 0.55), ("sqrt", 1 - 0.9 * math.sqrt(0.5))]
)
def test_stable_phase_stays_at_the_peak_until_the_decay(decay_type: str, half: float) -> None:
    wsd = Section(decay_type=decay_type, stable_steps=8)
    assert [learning_rate_factor(step, wsd) for step in range(4, 13)] == [1.0] * 9
    assert learning_rate_factor(13, wsd) < 1.0
    assert learning_rate_factor(16, wsd) == pytest.approx(half)
    assert learning_rate_factor(20, wsd) == pytest.approx(0.1) == learning_rate_factor(25, wsd)


@given(
    total=st.integers(1, 10_000),
    warmup=st.integers(0, 100),
    ratio=st.floats(1e-6, 1.0),
    decay_type=st.sampled_from(("linear", "cosine", "sqrt")),
)
def test_schedule_of_a_job_never_rises_after_its_warm_up(
    total: int, warmup: int, ratio: float, decay_type: str
) -> None:
    section = LrScheduler(warmup_steps=warmup, total_steps=total, decay_type=decay_type, decay_ratio=ratio)
    assume(section.decay_steps <= total - warmup)
    steps = sorted({*range(warmup, min(total, warmup + 50)), total - section.decay_steps, total - 1, total, total + 1})
    factors = [learning_rate_factor(step, section) for step in steps if step >= max(1, warmup)]
    assert factors == sorted(factors, reverse=True) and all(0.1 <= each <= 1.0 for each in factors)
    assert learning_rate_factor(max(1, total - section.decay_steps, warmup), section) == 1.0 or not warmup


def test_schedule_of_warm_up_alone_reaches_the_floor_after_it() -> None:
    only_warmup = Section(warmup_steps=4, total_steps=4)
    assert [learning_rate_factor(step, only_warmup) for step in (4, 5, 6)] == [1.0, 0.1, 0.1]
