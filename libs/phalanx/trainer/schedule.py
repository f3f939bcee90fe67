"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from typing import Protocol


class ScheduleSection(Protocol):
    """What `learning_rate_factor` reads of the job's `[lr_scheduler]`."""

    @property
    def warmup_steps(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def decay_type(self) -> str: ...
    @property
    def min_lr_factor(self) -> float: ...


def learning_rate_factor(step: int, schedule: ScheduleSection) -> float:
    """Factor on the peak learning rate for `step` (1-based): linear warm-up, then decay to `min_lr_factor` at
    `total_steps`.

    Cosine: Loshchilov and Hutter, "SGDR" (2017), equation 5, one period without restarts. Past `total_steps` the floor
    holds.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.decay_type == "none":
        return 1.0
    decay_steps = max(1, schedule.total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / decay_steps)
    shape = 1.0 - progress if schedule.decay_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr_factor + (1.0 - schedule.min_lr_factor) * shape
