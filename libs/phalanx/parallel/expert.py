"""Expert parallelism: the ranks of the ep axis, which read other windows, share the experts of every layer.

A rank holds E / ep consecutive experts whole (or their tp slices). Rows of tokens go to the rank that holds their
expert and come back, by two all-to-alls in forward and two in backward (GShard, arXiv 2006.16668, section 3.2), with
the very numbers of rows that the routers chose: none is dropped, and none is filled up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.core.box import Box
from phalanx.models.experts import Experts
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.tensor import TensorSlices


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    found = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
    return found


class _UnevenAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


class ExpertExchange:
    """Sends rows to the ranks of a group that hold their experts, and their outputs back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, rows: Tensor, counts: Tensor, segments: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Outputs [R, D] of rows [R, D], sorted by expert, of which expert e has counts[e] (int64 [E]). segments: as
        `Experts.segments`, of the experts of this rank.
        """
        sent = counts.view(self._group.size(), -1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        sent_rows, received_rows = sent.sum(1).tolist(), received.sum(1).tolist()
        found: Tensor = _UnevenAllToAll.apply(rows, sent_rows, received_rows, self._group)  # type: ignore[no-untyped-call]
        # They lie by the rank that sent them, and then by expert.
        experts = torch.arange(received.shape[1], device=rows.device).repeat(len(received))
        order = experts.repeat_interleave(received.flatten()).argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        outputs = segments(found.index_select(0, order), received.sum(0)).index_select(0, inverse)
        back: Tensor = _UnevenAllToAll.apply(outputs, received_rows, sent_rows, self._group)  # type: ignore[no-untyped-call]
        return back


def cut_experts(stage: nn.Module, slices: TensorSlices, mesh: Mesh) -> None:
    """Leave a stage on the meta device, already cut over tp, this rank's experts, in place."""
    group = mesh.groups.get("ep")
    if group is None:
        return
    for name, inner in stage.named_modules():
        if not isinstance(inner, Experts):
            continue
        for own, parameter in list(inner.named_parameters()):
            count = parameter.shape[0] // mesh.ep
            start = group.rank() * count
            setattr(inner, own, nn.Parameter(parameter.detach().narrow(0, start, count).clone()))
            box = slices.boxes[f"{name}.{own}"]
            slices.boxes[f"{name}.{own}"] = Box((start, *box.offset[1:]), (count, *box.shape[1:]))
        inner.exchange = ExpertExchange(group)
