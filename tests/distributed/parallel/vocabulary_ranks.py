"""Ranks that compute the loss of logits whose vocabulary is cut over them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.parallel.loss import token_sums

TOKENS, WIDTH = 5, 6


def _random(logits: Tensor) -> Tensor:
    return logits


def _far_apart(logits: Tensor) -> Tensor:
    """The first rank's logits are so much lower that their exponentials vanish beside the others'."""
    return torch.cat((logits[..., :WIDTH] - 1e4, logits[..., WIDTH:]), -1)


def _ruled_out(logits: Tensor) -> Tensor:
    """A whole rank's part of the vocabulary has no probability."""
    return torch.cat((logits[..., :WIDTH], torch.full_like(logits[..., WIDTH:], -torch.inf)), -1)


CASES: dict[str, Callable[[Tensor], Tensor]] = {"random": _random, "far apart": _far_apart, "ruled out": _ruled_out}


def run_cases(context: RankContext) -> None:
    """Entry of two ranks: by case the largest differences from torch on whole logits, of the loss, of
    log^2 Z and of the local gradient.
    """
    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    group = dist.group.WORLD
    assert group is not None
    for name, made in CASES.items():
        drawn = torch.randn(1, TOKENS, 2 * WIDTH, generator=torch.Generator().manual_seed(3))
        whole = made(drawn).requires_grad_()
        targets = torch.tensor([[0, 3, -100, 5, 2]]) + (WIDTH if name == "far apart" else 0)
        targets[0, 2] = -100
        loss = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        squares = (whole.logsumexp(-1).square() * (targets != -100)).sum()
        (loss + 0.1 * squares).backward()
        part = slice(context.rank * WIDTH, (context.rank + 1) * WIDTH)
        local = whole.detach()[..., part].clone().requires_grad_()
        own_loss, own_squares = token_sums(local, targets, group)
        (own_loss + 0.1 * own_squares).backward()
        assert whole.grad is not None and local.grad is not None
        pairs = ((own_loss, loss), (own_squares, squares), (local.grad, whole.grad[..., part]))
        context.report("result", **{name: [float((own - other).abs().max()) for own, other in pairs]})
    dist.destroy_process_group()
