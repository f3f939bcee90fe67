"""What the trainer tells of experts: the load of a step with its loss of balance, and when the picture is due."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.core.expert_load import ExpertHeat, ExpertLoad
from phalanx.spec import Job, parse_job
from phalanx.trainer.expert_figures import HEAT_EVERY_S, HeatPace, expert_load, heat_fields

COUNTS = torch.tensor([[4, 0], [1, 3]])


def _job(**moe: Any) -> Job:
    return parse_job(
        {
            "job": {"name": "experts", "storage": "memory://experts"},
            "model": {"preset": "mixtral-tiny", "args": {"moe": moe}},
            "data": {"train": "memory://experts/train"},
            "training": {"seq_len": 8, "steps": 1, "global_batch_size": 1},
            "optimizer": {"lr": 1e-3},
        }
    )


def test_load_tells_the_loss_of_balance_where_it_is_weighed_and_finite() -> None:
    weighed, unweighed = _job(aux_loss=0.01), _job(aux_loss=0.0)
    assert expert_load(weighed, COUNTS, 0.5) == ExpertLoad(2.0, 1.75, 0.25, 0.5)
    assert expert_load(unweighed, COUNTS, 0.0).balance_loss is None
    assert expert_load(weighed, COUNTS, float("nan")).balance_loss is None, "JSON has no such number"


def test_picture_is_due_at_first_then_seldom_and_at_the_last_step() -> None:
    now_s = [100.0]
    pace = HeatPace(lambda: now_s[0])
    assert pace.is_due(is_last=False) and not pace.is_due(is_last=False)
    now_s[0] += HEAT_EVERY_S
    assert pace.is_due(is_last=False) and not pace.is_due(is_last=False)
    assert pace.is_due(is_last=True)


def test_picture_as_fields_is_that_of_the_counts() -> None:
    fields = heat_fields(COUNTS)
    heat = ExpertHeat(
        *(fields[name] for name in ("num_layers", "num_experts", "experts_per_cell")), b64decode(fields["load"])
    )
    assert heat == ExpertHeat.of(COUNTS.numpy())
    assert heat.multiples() == pytest.approx(np.array([[2, 0], [0.5, 1.5]]), rel=0.023)
