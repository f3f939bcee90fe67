"""What is minimised (`[loss] fn`) and what is measured beside it (`[metrics.fn]`).

Each function gives a SUM over the tokens whose target is not -100. Phalanx divides the sums of all micro-batches and
ranks by the number of such tokens, once; a mean would depend on how the batch is dealt out, so it is refused.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def loss(logits: Tensor, targets: Tensor, z_weight: float = 0.0) -> Tensor:
    """Cross-entropy, and `z_weight` x the squared logarithm of the softmax's denominator, which keeps logits small.

    logits: fp32 [B, S, V]. targets: int64 [B, S]. z_weight: from `[loss.args]` of job.toml.
    """
    entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    denominators = torch.logsumexp(logits, dim=-1)
    return entropy + z_weight * torch.where(targets == -100, 0.0, denominators.square()).sum()


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """How many tokens were foretold rightly; it is shown as a part of all."""
    return (logits.argmax(dim=-1) == targets).sum().float()
