"""Dynamic loss scaling for weights of float16, whose gradients would fall below its smallest number (Micikevicius et
al. 2018, "Mixed precision training", arXiv 1710.03740, section 3.2).

The loss of a step is multiplied by the scale before backward and gradients are divided by it before anything looks at
them. Where they overflowed, all ranks see the same non-finite norm, leave the update out and lower the scale; after a
number of finite steps in a row it grows. The scale and the length of that row are counters of a checkpoint, so a run
that goes on does the same as one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.spec.training import Training

SCALE, STEPS = "loss_scale", "loss_scale_steps"
SMALLEST, LARGEST = 1.0, 2.0**40


class LossScale:
    """The scale of the next step; always 1 for weights of any other type."""

    def __init__(self, training: Training) -> None:
        self.is_dynamic = training.mixed_precision_param == "float16"
        self.value = training.loss_scale_init if self.is_dynamic else 1.0
        self._growth, self._backoff = training.loss_scale_growth, training.loss_scale_backoff
        self._interval = training.loss_scale_interval
        self._steps = 0

    @property
    def may_fall(self) -> bool:
        """Whether a lower scale may still make a step finite."""
        return self.is_dynamic and self.value > SMALLEST

    def after(self, *, is_finite: bool) -> None:
        """The scale that follows a step."""
        if not self.is_dynamic:
            return
        if not is_finite:
            self.value, self._steps = max(self.value * self._backoff, SMALLEST), 0
            return
        self._steps += 1
        if self._steps >= self._interval:
            self.value, self._steps = min(self.value * self._growth, LARGEST), 0

    def counters(self) -> dict[str, int | float]:
        """What `resume` takes; nothing where the scale is always 1."""
        return {SCALE: self.value, STEPS: self._steps} if self.is_dynamic else {}

    def resume(self, counters: Mapping[str, int | float]) -> None:
        """Goes on from a checkpoint's counters; one of a run with another type has none."""
        if self.is_dynamic and SCALE in counters:
            self.value, self._steps = float(counters[SCALE]), int(counters[STEPS])
