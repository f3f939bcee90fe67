"""Building a job's model without memory, and bf16 products on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from phalanx.core.errors import PhalanxError
from phalanx.parallel import count_parameters
from phalanx.parallel.build import build_on_meta
from phalanx.parallel.precision import linear, widen_linears
from phalanx.planner import ModelShape
from phalanx.planner import count_parameters as planned_parameters
from phalanx.spec import Job, parse_job

SHAPE = {"dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 128}


def _job(class_: str | None = None, **args: Any) -> Job:
    model = {"args": SHAPE | args} if class_ is None else {"class": class_, "args": args}
    return parse_job(
        {
            "job": {"name": "build", "storage": "memory://build"},
            "model": model,
            "data": {"train": "memory://build/train"},
            "training": {"seq_len": 8, "steps": 1, "global_batch_size": 1},
            "optimizer": {"lr": 1e-3},
        }
    )


@pytest.mark.parametrize("tied", [False, True])
def test_count_of_parameters_equals_the_planners(tied: bool) -> None:
    planned = planned_parameters(ModelShape(**SHAPE, tie_embeddings=tied)).total
    assert count_parameters(_job(tie_embeddings=tied)) == planned


def test_model_of_405_billion_parameters_is_built_without_memory() -> None:
    job = _job(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53248, vocab_size=128256)
    assert all(parameter.is_meta for parameter in build_on_meta(job).parameters())
    assert count_parameters(job) == 405_853_388_800


@pytest.mark.parametrize("args", [{"dropout": 0.1}, {"moe": {"num_experts": 2, "top_k": 1, "expert_ffn_dim": 8}}])
def test_model_that_does_not_train_yet_is_refused(args: dict[str, Any]) -> None:
    with pytest.raises(PhalanxError, match=next(iter(args))):
        build_on_meta(_job(**args))


def test_bf16_linear_on_a_cpu_is_the_fp32_product_rounded_once() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 32)
    reference = nn.Linear(48, 32)
    reference.load_state_dict({name: t.bfloat16().float() for name, t in layer.state_dict().items()})
    layer.to(torch.bfloat16)
    widen_linears(layer)
    x = torch.randn(5, 48).bfloat16().requires_grad_()
    wide = x.detach().float().requires_grad_()
    y, expected = layer(x), reference(wide)
    assert torch.equal(y, expected.bfloat16())
    y.sum().backward()
    expected.sum().backward()
    assert x.grad is not None
    assert wide.grad is not None
    assert torch.equal(x.grad, wide.grad.bfloat16())
    assert set(dict(layer.named_parameters())) == {"weight", "bias"}


def test_fp32_linear_is_torchs_own() -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    assert torch.equal(linear(x, weight), nn.functional.linear(x, weight))
