"""Tensor and sequence parallelism without DTensor: each rank holds a plain slice of a weight, and the module that holds
it exchanges.

`apply_plan` runs on a model on the meta device, before anything is allocated. What it replaced is recorded in
`TensorSlices`, so that every local parameter can be told in global coordinates. See
docs/decisions/explicit-tensor-parallelism.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.box import Box, whole
from phalanx.core.errors import PhalanxError
from phalanx.models.experts import Experts, Product, Router
from phalanx.models.protocol import KeyValueHeads, Style
from phalanx.parallel.collectives import gather_sequence, scatter_sequence_sum
from phalanx.parallel.precision import linear


class RowwiseLinear(nn.Linear):
    """Linear on local input features [B, S, I / n]; gives the sum over ranks, scattered: [B, S / n, O]."""

    group: dist.ProcessGroup
    product: Product = staticmethod(linear)

    def forward(self, input: Tensor) -> Tensor:
        """The bias, if any, is whole on each rank and added after the sum."""
        y: Tensor = scatter_sequence_sum(self.product(input, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class VocabEmbedding(nn.Embedding):
    """Embedding of the local rows [V / n, D]; gives the sum over ranks, scattered: [B, S / n, D]."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        """input: int64 [B, S], global token ids."""
        local = input - self.group.rank() * self.weight.shape[0]
        is_mine = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(torch.where(is_mine, local, 0), self.weight)
        y: Tensor = scatter_sequence_sum(rows * is_mine.unsqueeze(-1), self.group)
        return y


@dataclass(slots=True)
class TensorSlices:
    """Where the parameters of one rank lie in the global model.

    shapes: global shape by name. boxes: the tp slice by name, before fully_shard. partial: held by every tp rank, with
    gradients that are sums over the rank's part of the sequence or of the heads only. copies: of heads of keys and
    values, how many consecutive tp ranks hold the same slice, where more than one do; their gradients are partial too.
    """

    shapes: dict[str, tuple[int, ...]]
    boxes: dict[str, Box] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    copies: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> TensorSlices:
        """Of a model that isn't cut."""
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return cls(shapes, {name: whole(shape) for name, shape in shapes.items()})


def apply_plan(model: nn.Module, plan: Mapping[str, Style], group: dist.ProcessGroup) -> TensorSlices:
    """Cut the meta-device `model` in place by `plan` over `group`.

    Raises PhalanxError where a size doesn't divide, a parameter is in no planned module, or a style doesn't fit its
    module.
    """
    slices = TensorSlices.of(model)
    tied: dict[int, nn.Parameter] = {}
    planned = {name: style for name, _ in list(model.named_modules()) if (style := _style_of(name, plan))}
    for name, style in planned.items():
        _apply_style(model.get_submodule(name), name, style, slices, group, tied)
    for name in slices.shapes:
        if name.rpartition(".")[0] not in planned:
            raise PhalanxError(
                "parallel_plan()",
                value=name,
                expected="every module with parameters to be named by a pattern",
                remedy="add a pattern for it, or set [parallel] tp = 1",
            )
    return slices


def check_patterns(model: nn.Module, plan: Mapping[str, Style]) -> None:
    """Raises PhalanxError where a pattern names no module of the whole model."""
    names = [name for name, _ in model.named_modules()]
    idle = next((pattern for pattern in plan if not any(_names(pattern, n) for n in names)), None)
    if idle is not None:
        raise PhalanxError(
            "parallel_plan()",
            value=idle,
            expected=f"patterns that each name a module of {type(model).__name__}",
            remedy="correct the pattern or remove it",
        )


def check_plan(model: nn.Module, plan: Mapping[str, Style], tp: int) -> None:
    """Raises PhalanxError where a meta-device model can't be cut by `plan` over `tp` ranks. Afterwards it is what the
    first rank has, and runs on the meta device alone.
    """
    apply_plan(model, plan, cast("dist.ProcessGroup", _FirstOf(tp)))


@dataclass(frozen=True, slots=True)
class _FirstOf:
    """The part of a process group that a cut asks for, as its first rank has it."""

    num_ranks: int

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return 0


def _style_of(name: str, plan: Mapping[str, Style]) -> Style | None:
    return next((style for pattern, style in plan.items() if _names(pattern, name)), None)


def _names(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _apply_style(
    module: nn.Module,
    name: str,
    style: Style,
    slices: TensorSlices,
    group: dist.ProcessGroup,
    tied: dict[int, nn.Parameter],
) -> None:
    def cut(parameter_name: str, dim: int, copies: int = 1) -> None:
        _cut(module, name, parameter_name, dim, slices, group, tied, copies)

    if style == "sequence_norm":
        slices.partial.update(f"{name}.{own}" for own, _ in module.named_parameters(recurse=False))
        module.register_forward_hook(lambda _module, _inputs, output: gather_sequence(output, group))
    elif style in ("head_norm", "replicated"):
        slices.partial.update(f"{name}.{own}" for own, _ in module.named_parameters(recurse=False))
    elif style == "router" and isinstance(module, Router):
        slices.partial.add(f"{name}.weight")
        module.balance.share = 1 / group.size()  # all ranks of the group have the same loss of balance
    elif style == "experts" and isinstance(module, Experts):
        for own, dim in (("w1", 1), ("w2", 2), ("w3", 1)):
            cut(own, dim)
        module.register_forward_hook(lambda _module, _inputs, output: scatter_sequence_sum(output, group))
    elif style == "vocab_embedding" and type(module) is nn.Embedding and module.padding_idx is None:
        cut("weight", 0)
        _become(module, VocabEmbedding, group)
    elif style == "rowwise" and type(module) is nn.Linear:
        cut("weight", 1)
        _become(module, RowwiseLinear, group)
        if module.bias is not None:
            slices.partial.add(f"{name}.bias")
    elif (style in ("colwise", "vocab_head") or isinstance(style, KeyValueHeads)) and type(module) is nn.Linear:
        copies = copies_of(style, group.size(), name) if isinstance(style, KeyValueHeads) else 1
        cut("weight", 0, copies)
        if module.bias is not None:
            cut("bias", 0, copies)
    else:
        raise PhalanxError(
            f"parallel_plan() {name}",
            value=style,
            expected=f"a style that fits a {type(module).__name__}",
            remedy="see phalanx.models.protocol.Style",
        )


def copies_of(style: KeyValueHeads, tp: int, name: str) -> int:
    """How many consecutive tp ranks hold the same heads. Raises PhalanxError where neither number divides the other."""
    if style.num_heads % tp == 0:
        return 1
    if tp % style.num_heads:
        raise PhalanxError(
            "[parallel] tp",
            value=tp,
            expected=f"a divisor or a multiple of the {style.num_heads} heads of {name}",
            remedy="change tp or the number of heads",
        )
    return tp // style.num_heads


def _become(module: nn.Module, kind: type[RowwiseLinear | VocabEmbedding], group: dist.ProcessGroup) -> None:
    """Turn a module into its cut form in place, with the same parameters under the same names."""
    module.__class__ = kind
    object.__setattr__(module, "group", group)


def _cut(
    module: nn.Module,
    module_name: str,
    name: str,
    dim: int,
    slices: TensorSlices,
    group: dist.ProcessGroup,
    tied: dict[int, nn.Parameter],
    copies: int,
) -> None:
    parameter = getattr(module, name)
    if id(parameter) in tied:  # the other end of a tied weight, cut alike
        setattr(module, name, tied[id(parameter)])
        return
    size, remainder = divmod(parameter.shape[dim], group.size() // copies)
    if remainder:
        raise PhalanxError(
            "[parallel] tp",
            value=group.size(),
            expected=f"a divisor of dimension {dim} of {module_name}.{name} ({parameter.shape[dim]})",
            remedy="change tp or the model's sizes",
        )
    start = group.rank() // copies * size
    local = nn.Parameter(parameter.detach().narrow(dim, start, size).clone())
    setattr(module, name, local)
    tied[id(parameter)] = tied[id(local)] = local
    full_name = f"{module_name}.{name}"
    if full_name in slices.boxes:
        shape = slices.shapes[full_name]
        offset = tuple(start if i == dim else 0 for i in range(len(shape)))
        slices.boxes[full_name] = Box(offset, tuple(local.shape))
        if copies > 1:
            slices.copies[full_name] = copies
