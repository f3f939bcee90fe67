"""What a rank tells of a mixture's experts: the load of each step, and now and then a picture of all experts."""

from __future__ import annotations

import math
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

from torch import Tensor

from phalanx.core.expert_load import ExpertHeat, ExpertLoad
from phalanx.spec import Job

HEAT_EVERY_S = 10.0


def expert_load(job: Job, counts: Tensor, balance_loss: float) -> ExpertLoad:
    """Of a step. counts int64 [layers, E]: tokens by layer and expert. balance_loss: over all ranks."""
    moe = job.model.decoder.moe
    assert moe is not None, "counts come of it"
    is_told = moe.aux_loss > 0 and math.isfinite(balance_loss)
    return ExpertLoad.of(counts.cpu().numpy(), balance_loss if is_told else None)


class HeatPace:
    """Says when the picture is told again: every `HEAT_EVERY_S` at most, so that it stays a small part of what is sent,
    and at the last step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_s: float | None = None

    def is_due(self, *, is_last: bool) -> bool:
        """Whether it is to be told now; it then counts as told."""
        now_s = self._clock()
        if not is_last and self._told_s is not None and now_s - self._told_s < HEAT_EVERY_S:
            return False
        self._told_s = now_s
        return True


def heat_fields(counts: Tensor) -> dict[str, Any]:
    """The picture as fields of an event: those of `ExpertHeat`, its bytes in base64."""
    heat = ExpertHeat.of(counts.cpu().numpy())
    return {
        "num_layers": heat.num_layers,
        "num_experts": heat.num_experts,
        "experts_per_cell": heat.experts_per_cell,
        "load": b64encode(heat.load).decode(),
    }
