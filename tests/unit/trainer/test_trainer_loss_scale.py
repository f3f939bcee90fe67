"""Dynamic loss scaling: how the scale moves, what is saved of it, and what an overflow means to the loop."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.core.errors import PhalanxError
from phalanx.core.step_parts import StepParts
from phalanx.spec import parse_job
from phalanx.spec.training import Training
from phalanx.trainer.control import Orders
from phalanx.trainer.loop import Word, tell, update
from phalanx.trainer.loss_scale import SMALLEST, LossScale
from phalanx.trainer.recorder import StepResult


def _training(**changes: Any) -> Training:
    keys = {"loss_scale_init": 8.0, "loss_scale_interval": 3, "mixed_precision_param": "float16", **changes}
    return parse_job(
        {
            "job": {"name": "scale", "storage": "memory://scale"},
            "model": {"preset": "tiny"},
            "data": {"train": "memory://scale/train"},
            "training": {"seq_len": 8, "steps": 1, "global_batch_size": 1, **keys},
            "optimizer": {"lr": 1e-3},
        }
    ).training


def _values(scale: LossScale, finite: str) -> list[float]:
    found = []
    for step in finite:
        scale.after(is_finite=step == "+")
        found.append(scale.value)
    return found


def test_scale_moves_as_torchs_grad_scaler_does() -> None:
    finite = "+++-++--+++++++-"
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([parameter], lr=0.0)
    expected = []
    for step in finite:
        theirs.scale(parameter.sum()).backward()
        assert parameter.grad is not None
        if step == "-":
            parameter.grad.fill_(math.inf)
        theirs.step(sgd)
        theirs.update()
        sgd.zero_grad()
        expected.append(theirs.get_scale())
    assert _values(LossScale(_training()), finite) == expected


def test_scale_never_falls_below_one_and_grows_again() -> None:
    scale = LossScale(_training(loss_scale_growth=4.0, loss_scale_backoff=0.25))
    assert _values(scale, "---+++") == [2.0, SMALLEST, SMALLEST, SMALLEST, SMALLEST, 4.0]


def test_resumed_scale_goes_on_as_one_that_was_never_interrupted() -> None:
    straight, resumed = LossScale(_training()), LossScale(_training())
    _values(straight, "-++")
    resumed.resume({"num_updates": 2, **straight.counters()})
    assert _values(resumed, "+-+") == _values(straight, "+-+")
    resumed.resume({"num_updates": 2})  # a checkpoint of a run with other weights
    assert resumed.value == straight.value


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_other_types_are_not_scaled_and_save_nothing(param: str) -> None:
    scale = LossScale(_training(mixed_precision_param=param))
    assert _values(scale, "-+++") == [1.0] * 4
    assert scale.counters() == {} and not scale.may_fall


class Bench:
    """A session of one rank with a policy for what is not finite, and what it told."""

    def __init__(self, training: Training) -> None:
        self.loss_scale, self.step, self.last_step, self.rank = LossScale(training), 7, 9, 0
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.applied: list[bool] = []
        self.replicator = self.not_finite_since = None
        self.saver = SimpleNamespace(wait_captured=lambda: None)
        self.model = SimpleNamespace(clock=SimpleNamespace(part=lambda _: nullcontext()), zero_gradients=lambda: None)
        self.replicas = SimpleNamespace(meet=lambda *_, applied: self.applied.append(applied))
        job = SimpleNamespace(training=training, recovery=SimpleNamespace(on_nan="notify"))
        self.prepared = SimpleNamespace(job=job)

    def report(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    def end_step(self, loss: float, norm: float) -> None:
        session: Any = self
        update(session, [], Word(loss, (norm,), Orders.NONE, False), 1.0, None)
        tell(session, StepResult(self.step, loss, norm, 8, 0.5, StepParts.of({})), 1.0, None, 0.0)
        self.loss_scale.after(is_finite=False)


def test_overflow_under_a_scaled_loss_is_left_out_by_any_policy_and_told_apart() -> None:
    bench = Bench(_training(non_finite="stop"))
    for _ in range(3):
        bench.end_step(2.0, math.inf)
    assert bench.told == [("overflow", {"step": 7, "loss": 2.0, "loss_scale": scale}) for scale in (8.0, 4.0, 2.0)]
    assert bench.applied == [False] * 3, "and no progress is told, which watchers would take for a fault"
    with pytest.raises(PhalanxError, match=r"training\.non_finite is 'stop'"):
        bench.end_step(2.0, math.inf)


def test_overflow_is_told_by_rank_0_alone() -> None:
    bench = Bench(_training())
    bench.rank = 1
    bench.end_step(2.0, math.inf)
    assert bench.told == [] and bench.applied == [False]


@pytest.mark.parametrize(("param", "loss"), [("float16", math.nan), ("float32", 2.0)])
def test_loss_that_is_not_finite_or_has_no_scale_is_no_overflow(param: str, loss: float) -> None:
    with pytest.raises(PhalanxError, match=r"training\.non_finite is 'stop'"):
        Bench(_training(non_finite="stop", mixed_precision_param=param)).end_step(loss, math.nan)
