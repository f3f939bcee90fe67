"""Products in fp8 written down with torch alone, to hold torchao's and what Phalanx makes of them against."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

NARROW, WIDE_RANGE = torch.float8_e4m3fn, torch.float8_e5m2


def require_torchao() -> None:
    """Skips the module's tests where torchao is not installed, and fails under CI=true."""
    if importlib.util.find_spec("torchao") is not None:
        return
    reason = "no torchao: install phalanx[fp8]"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """fp32 x in fp8 and back. dim: the one that a product sums over, for a scale (a power of two) for each row of it;
    None: one scale for all.
    """
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / largest.double().clamp(min=1e-12)).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x * scale).to(dtype).float() / scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.is_by_row = recipe == "rowwise"
        dims = (1, 1) if ctx.is_by_row else (None, None)
        rows = x.flatten(0, -2).float()
        y = rounded(rows, NARROW, dims[0]) @ rounded(weight.float(), NARROW, dims[1]).T
        return y.view(*x.shape[:-1], -1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows, wide, above = x.flatten(0, -2).float(), weight.float(), gradient.flatten(0, -2).float()
        if ctx.is_by_row:
            of_x = rounded(above, NARROW, 1) @ rounded(wide, NARROW, 0)
            of_weight = rounded(above, NARROW, 0).T @ rounded(rows, NARROW, 0)
        else:
            of_x = rounded(above, WIDE_RANGE) @ rounded(wide, NARROW)
            of_weight = rounded(above, WIDE_RANGE).T @ rounded(rows, NARROW)
        return of_x.view(x.shape).to(x.dtype), of_weight.to(weight.dtype), None


def product(x: Tensor, weight: Tensor, recipe: str) -> Tensor:
    """x [..., I] times weight [O, I] with both rounded to fp8, in x's type; so are both products of its backward."""
    return _Product.apply(x, weight, recipe)  # type: ignore[no-any-return]


class _Linear(nn.Linear):
    recipe: str

    def forward(self, input: Tensor) -> Tensor:
        y = product(input, self.weight, self.recipe)
        return y if self.bias is None else y + self.bias


def narrow_layers(model: nn.Module, recipe: str) -> None:
    """Make every linear product of `model.layers` one in fp8, in place."""
    for inner in model.get_submodule("layers").modules():
        if type(inner) is nn.Linear:
            inner.__class__ = _Linear
            object.__setattr__(inner, "recipe", recipe)


def loss_and_gradients(
    decoder: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor], weights: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of a decoder on a batch (tokens, targets, positions, documents), a window at a time, weights rounded to bfloat16:
    the mean loss over all targets, and fp32 sums of gradients by name.
    """
    decoder.load_state_dict(dict(weights))
    decoder.to(torch.bfloat16)
    valid_tokens = (batch[1] != -100).sum()
    loss, sums = torch.zeros(()), {name: torch.zeros(p.shape) for name, p in decoder.named_parameters()}
    for tokens, targets, positions, documents in zip(*(field.split(1) for field in batch), strict=True):
        balance = (targets != -100).sum(1) / valid_tokens
        logits = decoder(tokens, positions, documents, balance).float()
        part = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        (part / valid_tokens).backward()
        loss += part.detach() / valid_tokens
        for name, parameter in decoder.named_parameters():
            assert parameter.grad is not None
            sums[name] += parameter.grad.float()
            parameter.grad = None
    return loss, sums
