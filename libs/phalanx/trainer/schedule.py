"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol


class ScheduleSection(Protocol):
    """What `learning_rate_factor` reads of the job's `[lr_scheduler]`."""

    @property
    def warmup_steps(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def decay_steps(self) -> int: ...
    @property
    def decay_type(self) -> str: ...
    @property
    def min_lr_factor(self) -> float: ...


def learning_rate_factor(step: int, schedule: ScheduleSection) -> float:
    """Factor on the peak learning rate for `step` (1-based): linear warm-up, the peak until the last `decay_steps` of
    `total_steps`, then decay to `min_lr_factor`. Past `total_steps` the floor holds.

    Cosine: Loshchilov and Hutter, "SGDR" (2017), equation 5, one period without restarts. A stable phase: Hu et al.,
    "MiniCPM" (arXiv 2404.06395, section 4.2); its decay as 1 - sqrt: Haegele et al. (arXiv 2405.18392).
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.decay_type == "none":
        return 1.0
    done = (step - (schedule.total_steps - schedule.decay_steps)) / max(1, schedule.decay_steps)
    shape = _SHAPES[schedule.decay_type](min(1.0, max(0.0, done)))
    return schedule.min_lr_factor + (1.0 - schedule.min_lr_factor) * shape


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1.0 - math.sqrt(done),
}
