"""The collectives of tensor and sequence parallelism as autograd functions: each one's backward is the other's forward.

They run on gloo and NCCL alike, on dimension 1 (the sequence) of [B, S, D] activations. Blocks that torch.compile sees
break their graph here rather than trace a collective. On the meta device they give shapes, and exchange nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SEQUENCE_DIM = 1


def all_gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S / n, D] of each of n ranks -> [B, S, D] on all, without autograd."""
    parts = x.new_empty(group.size(), *x.shape)
    if not x.is_meta:
        dist.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.transpose(0, SEQUENCE_DIM).flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over n ranks of [B, S, D], of which each keeps its [B, S / n, D], without autograd."""
    batch, length, *rest = x.shape
    parts = x.reshape(batch, group.size(), length // group.size(), *rest).transpose(0, SEQUENCE_DIM).contiguous()
    if x.is_meta:
        return torch.empty_like(parts[0])
    if x.device.type == "cpu":  # gloo would reduce all to all: twice the bytes, in twice the rounds
        received = torch.empty_like(parts)
        dist.all_to_all_single(received.flatten(0, 1), parts.flatten(0, 1), group=group)
        return received.sum(0)
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter_single(mine, parts.flatten(0, 1), group=group)
    return mine


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_sequence(gradients[0], ctx.group), None


class _ScatterSequenceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather_sequence(gradients[0], ctx.group), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S / n, D] -> [B, S, D]: all-gather; backward sums the partial gradients and scatters them."""
    return _GatherSequence.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def scatter_sequence_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial [B, S, D] -> summed [B, S / n, D]: reduce-scatter; backward gathers."""
    return _ScatterSequenceSum.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        parts = x.new_empty(group.size(), *x.shape)
        dist.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
        return parts.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(-1, ctx.group.rank() * ctx.width, ctx.width), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_vocabulary(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S, V / n] of each of n ranks -> [B, S, V] on all. Every rank must compute the same from it: backward takes
    this rank's part of the gradient, without a sum.
    """
    return _GatherVocabulary.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def all_reduce_coalesced(tensors: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum each tensor over the group in place, all by one all-reduce; they must have one type, and lie together.
    device: of the group, where they travel.
    """
    if tensors:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def sum_parts(
    partial: list[Tensor], shared: list[tuple[Tensor, int]], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Sum in place, all by one all-reduce: each of `partial` over the group, each of `shared` (tensor, copies) over the
    `copies` consecutive ranks that hold the same. All must have one type, and lie together. device: of the group.

    What is shared travels in a place of its own for each that there is, so that no group of fewer ranks is needed.
    """
    placed = []
    for tensor, copies in shared:
        places = tensor.new_zeros(group.size() // copies, *tensor.shape)
        places[group.rank() // copies] = tensor
        placed.append(places)
    all_reduce_coalesced([*partial, *placed], group, device)
    for (tensor, copies), places in zip(shared, placed, strict=True):
        tensor.copy_(places[group.rank() // copies])
