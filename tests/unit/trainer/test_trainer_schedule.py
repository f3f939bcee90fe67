"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from phalanx.trainer.schedule import learning_rate_factor


@dataclass(frozen=True, slots=True)
class Section:
    """`[lr_scheduler]`."""

    warmup_steps: int = 4
    total_steps: int = 20
    decay_type: str = "cosine"
    min_lr_factor: float = 0.1


def test_warm_up_rises_in_equal_steps_to_the_peak() -> None:
    assert [learning_rate_factor(step, Section()) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_no_warm_up_starts_with_the_first_step_of_the_decay() -> None:
    expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 20))
    assert learning_rate_factor(1, Section(warmup_steps=0)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("decay_type", "middle"), [("cosine", 0.55), ("linear", 0.55), ("none", 1.0)])
def test_decay_at_its_middle_is_half_way_down(decay_type: str, middle: float) -> None:
    assert learning_rate_factor(12, Section(decay_type=decay_type)) == pytest.approx(middle, rel=1e-12)


@pytest.mark.parametrize("decay_type", ["cosine", "linear"])
def test_decay_falls_each_step_and_stays_at_its_floor_past_the_end(decay_type: str) -> None:
    factors = [learning_rate_factor(step, Section(decay_type=decay_type)) for step in range(4, 31)]
    falling, floor = factors[:17], factors[16:]
    assert falling == sorted(falling, reverse=True) and len(set(falling)) == len(falling)
    assert floor == pytest.approx([0.1] * len(floor), rel=1e-12)


def test_cosine_differs_from_linear_where_it_should() -> None:
    early = {name: learning_rate_factor(8, Section(decay_type=name)) for name in ("cosine", "linear")}
    assert early["linear"] == pytest.approx(0.775)
    assert early["cosine"] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_schedule_of_warm_up_alone_reaches_the_floor_after_it() -> None:
    only_warmup = Section(warmup_steps=4, total_steps=4)
    assert [learning_rate_factor(step, only_warmup) for step in (4, 5, 6)] == [1.0, 0.1, 0.1]
