"""Cross-entropy summed over tokens, on whole logits or on logits whose vocabulary is cut over `tp` and which are never
gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

IGNORED_TARGET = -100


class _TokenSum(torch.autograd.Function):
    """loss = sum over valid tokens of log(sum exp(x)) - x[target], with x shifted by its maximum; all in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        first_row = group.rank() * logits.shape[-1] if group else 0
        valid = targets != IGNORED_TARGET
        mine = valid & (targets >= first_row) & (targets < first_row + logits.shape[-1])
        column = torch.where(mine, targets - first_row, 0)

        maximum = logits.amax(-1).float()
        if group:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits.float() - maximum.unsqueeze(-1)
        at_target = torch.where(mine, shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), at_target))
        if group:
            dist.all_reduce(sums, group=group)

        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), column, mine, valid)
        ctx.dtype = logits.dtype
        return torch.where(valid, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        probabilities, column, mine, valid = ctx.saved_tensors
        gradient = probabilities * valid.unsqueeze(-1)
        gradient.scatter_add_(-1, column.unsqueeze(-1), -mine.unsqueeze(-1).to(gradient.dtype))
        return gradient.mul_(gradients[0]).to(ctx.dtype), None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def token_sum_cross_entropy(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over tokens of the cross-entropy, fp32 0-dim, the same on every rank of `group`.

    logits: [B, S, V], or [B, S, V / n] where `group` (n ranks, in order of vocabulary) cuts the vocabulary.
    targets: int64 [B, S]; -100 doesn't count.
    """
    return _TokenSum.apply(logits, targets, group)  # type: ignore[no-any-return, no-untyped-call]
