"""Whether training was healthy around a speculative checkpoint: figures in, a verdict out. Pure.

Healthy is one behind which `healthy_steps` steps were recorded, all of them finite, in which the monitor told no
incident of the loss, and whose median loss is not above that of as many steps before by more than the monitor's rule of
a divergence allows (5 %, `monitor.rules.loss`). The verdict needs the steps behind it alone: no clock, no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import nan
from statistics import median
from typing import Final

CLIMB: Final = 0.05
LOSS_KINDS: Final = frozenset({"nan", "spike", "divergence"})


class Health(StrEnum):
    """What is known of a checkpoint's health. Waiting ones are asked about again."""

    WAITING = "waiting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the monitor told of the loss: steps first_step to last_step of the live chain."""

    kind: str
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A checkpoint's health, and why."""

    health: Health
    why: str


def verdict(step: int, losses: Mapping[int, float], troubles: Iterable[Trouble], healthy_steps: int) -> Verdict:
    """The verdict on a checkpoint at `step`. losses: of the recorded live steps near it, by step; NaN where a step's
    loss or gradient norm was not finite.
    """
    last = step + healthy_steps
    for trouble in troubles:
        if trouble.last_step >= step and trouble.first_step <= last:
            where = f"steps {trouble.first_step} to {trouble.last_step}"
            return Verdict(Health.UNHEALTHY, f"the monitor told a {trouble.kind} in {where}")
    after = [losses[each] for each in range(step + 1, last + 1) if each in losses]
    if not all(map(math.isfinite, after)):
        return Verdict(Health.UNHEALTHY, f"a step up to {last} was not finite")
    if len(after) < healthy_steps:
        return Verdict(Health.WAITING, f"{len(after)} of {healthy_steps} healthy steps behind it are recorded")
    before = [
        losses[each] for each in range(step - healthy_steps + 1, step + 1) if math.isfinite(losses.get(each, nan))
    ]
    return _by_course(before, after)


def _by_course(before: Sequence[float], after: Sequence[float]) -> Verdict:
    level = median(after)
    if before:
        earlier = median(before)
        if level > earlier + CLIMB * abs(earlier):
            return Verdict(Health.UNHEALTHY, f"the loss climbed from {earlier:.4g} before it to {level:.4g} behind it")
    return Verdict(Health.HEALTHY, f"{len(after)} healthy steps behind it, median loss {level:.4g}")
