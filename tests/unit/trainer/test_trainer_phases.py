"""The time budgets of a rank's phases."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.gang.sections import Durations, Rule, allowance
from phalanx.spec.operation import Deadlines
from phalanx.trainer.phases import PATIENCE_S, Phases

DEADLINES = Deadlines(save_s=30.0, plan_s=900.0)


def budgets(*, waits_for_services: bool) -> dict[str, float]:
    told: list[dict[str, Any]] = []
    phases = Phases(lambda kind, **fields: told.append(fields), DEADLINES, waits_for_services=waits_for_services)
    for name in ("step", "save", "plan", "commit"):
        phases.enter(name, 3)
    assert {fields["step"] for fields in told} == {3}
    assert phases.longest_s >= max(fields["deadline_s"] for fields in told)
    return {fields["name"]: fields["deadline_s"] for fields in told}


def test_phases_that_need_services_may_take_as_long_as_services_may_be_away() -> None:
    longest_s = 900.0 + PATIENCE_S
    assert budgets(waits_for_services=True) == {"step": 120.0, "save": 30.0, "plan": longest_s, "commit": longest_s}


def test_phases_without_services_wait_for_storage_alone() -> None:
    assert budgets(waits_for_services=False) == {"step": 120.0, "save": 30.0, "plan": 30.0, "commit": 30.0}


def test_step_under_the_profiler_has_the_fixed_deadline_of_steps_alone() -> None:
    told: list[float] = []
    Phases(lambda kind, **fields: told.append(fields["deadline_s"]), Deadlines(step_s=40.0)).enter("profile", 3)
    steps = Durations.of([0.5] * 1000)
    assert told == [40.0] and allowance(Rule(), "step", steps, 40.0).limit_s == 9.5
    assert allowance(Rule(), "profile", steps, 40.0).limit_s == 40.0


def test_unknown_phase_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError):
        Phases(lambda kind, **fields: None, DEADLINES).enter("lunch", 1)
