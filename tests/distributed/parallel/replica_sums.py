"""Ranks that sum gradients over replicas as `parallel.whole` does and as torch's DistributedDataParallel does."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.parallel.whole import ReplicaSums

NUM_STEPS, NUM_MICRO_BATCHES = 3, 2


class Branches(nn.Module):
    """A layer of 4 MiB, small ones, and one that some ranks' batches do not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.sometimes = nn.Linear(8, 1 << 17), nn.Linear(1 << 17, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.small(self.large(x).tanh())
        return self.sometimes(x) if x.sum() > 0 else x


def run_sums(context: RankContext) -> None:
    """Entry of the ranks: the largest difference of any gradient, relative to the largest one of torch's, and whether
    some step left a layer out on some rank and not on another.
    """
    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    assert dist.group.WORLD is not None
    torch.manual_seed(0)
    ours = Branches()
    theirs = DistributedDataParallel(copy.deepcopy(ours), find_unused_parameters=True)
    sums = ReplicaSums(ours.parameters(), dist.group.WORLD)
    torch.manual_seed(1 + context.rank)
    worst, reached = 0.0, []
    for _ in range(NUM_STEPS):
        parts = torch.randn(NUM_MICRO_BATCHES, 3, 8)
        for number, part in enumerate(parts):
            is_last = number == NUM_MICRO_BATCHES - 1
            sums.begin(is_last=is_last)
            ours(part).square().sum().backward()
            reached.append(bool(ours.small(ours.large(part).tanh()).sum() > 0))
            with theirs.no_sync() if not is_last else torch.enable_grad():
                theirs(part).square().sum().backward()
        sums.finish()
        for own, other in zip(ours.parameters(), theirs.module.parameters(), strict=True):
            expected = torch.zeros_like(own) if other.grad is None else other.grad * context.world_size
            assert own.grad is not None
            worst = max(worst, float((own.grad - expected).abs().max() / expected.abs().max().clamp(min=1e-6)))
            own.grad = other.grad = None
    all_reached = [None] * context.world_size
    dist.all_gather_object(all_reached, reached)
    context.report("result", worst=worst, differs=any(each != all_reached[0] for each in all_reached))
    dist.destroy_process_group()
