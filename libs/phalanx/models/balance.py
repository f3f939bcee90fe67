"""What keeps the experts of a layer equally busy: a loss beside the model's own, and the counts that move the bias of
the choice.

The loss is taken window by window and summed with weights that the caller gives, so that it does not know how windows
are dealt out to micro-batches and ranks. Counts are taken in backward, which runs once where recomputation runs the
forward twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.models.args import MoeShape
from phalanx.models.protocol import Context


class _Counted(torch.autograd.Function):
    """The weights as they are; backward also gives the loss a gradient of 1 and hands the counts over."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, counts: Tensor, balance: Balance) -> Tensor:
        ctx.balance, ctx.counts, ctx.loss = balance, counts, loss.detach()
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.balance.add(ctx.counts, ctx.loss)
        return gradients[0], torch.ones_like(ctx.loss), None, None


class Balance:
    """Of one layer's router.

    counts: int64 [E], tokens by expert since `take`, of windows with a weight above 0; None before the first. loss: the
    sum of the losses meanwhile. share: what part of the loss is this rank's to give a gradient to, where ranks compute
    the same.
    """

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self.share = 1.0
        self.context: Context | None = None
        self.counts: Tensor | None = None
        self.loss: Tensor | None = None

    def counted(self, weights: Tensor, scores: Tensor, chosen: Tensor, window_weights: Tensor) -> Tensor:
        """`weights` [B, S, top_k] with the balance loss behind it: a gradient that reaches them brings its own along.

        scores [B, S, E], chosen [B, S, top_k]: of the router. window_weights [B]: what each window's loss counts.
        The loss of a window is E / (top_k T) sum_i n_i P_i: n_i of its T tokens went to expert i, whose mean share of
        the scores was P_i (Switch Transformer, arXiv 2101.03961, equations 4-6, for top_k experts and a window at a
        time: DeepSeek-V3, arXiv 2412.19437, equations 17-20).
        """
        shape = self.shape
        chosen_counts = torch.zeros(scores.shape[0], shape.num_experts, dtype=torch.int64, device=scores.device)
        flat = chosen.flatten(1)
        chosen_counts.scatter_add_(1, flat, torch.ones_like(flat))
        counts = (chosen_counts * (window_weights > 0).unsqueeze(1)).sum(0)
        length = scores.shape[1] if self.context is None else self.context.length
        whole = chosen_counts if self.context is None else self.context.sum(chosen_counts)
        shares = scores if shape.score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        busy = whole * (shape.num_experts / (shape.top_k * length))
        loss = ((busy * shares.sum(1) / length).sum(1) * window_weights).sum() * shape.aux_loss
        counted: Tensor = _Counted.apply(weights, loss * self.share, counts, self)  # type: ignore[no-untyped-call]
        return counted

    def add(self, counts: Tensor, loss: Tensor) -> None:
        """Adds to what is counted."""
        self.counts = counts if self.counts is None else self.counts + counts
        self.loss = loss if self.loss is None else self.loss + loss

    def take(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Counts int64 [E] and the loss fp32 0-dim since the last time, zeros where nothing was counted."""
        counts, loss = self.counts, self.loss
        self.counts = self.loss = None
        zeros = torch.zeros(self.shape.num_experts, dtype=torch.int64, device=device)
        return zeros if counts is None else counts, torch.zeros((), device=device) if loss is None else loss
