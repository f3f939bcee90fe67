"""What ranks know together about a mixture of experts: how much each window's balance counts, how many tokens each
expert had, and the bias that follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.models.decoder import Decoder
from phalanx.models.experts import Router
from phalanx.parallel.loss import IGNORED_TARGET
from phalanx.parallel.mesh import Mesh
from phalanx.spec import Job
from phalanx.spec.model import ModelArgs


def window_weights(targets: Tensor, valid_tokens: int) -> Tensor:
    """What the loss of balance of each window counts, fp32 [B]: its part of the valid tokens of the global batch, so
    that surplus and skipped windows count nothing. targets: whole windows, [B, S].
    """
    return (targets != IGNORED_TARGET).sum(1) / valid_tokens


@dataclass(frozen=True, slots=True)
class Routing:
    """The routers of this rank's stages by layer, of `num_layers` layers in all."""

    routers: Mapping[int, Router]
    num_layers: int
    num_experts: int
    mesh: Mesh

    @classmethod
    def of(cls, stages: Sequence[nn.Module], mesh: Mesh, job: Job) -> Routing | None:
        """Of a rank's stages, which may have none where the model has some; None where the model has no routers."""
        args = job.model.args
        if not isinstance(args, ModelArgs) or args.moe is None:
            return None
        found = {int(n): r for stage in stages if isinstance(stage, Decoder) for n, r in stage.routers.items()}
        return cls(found, args.n_layers, args.moe.num_experts, mesh)

    def take(self) -> tuple[Tensor, Tensor]:
        """What came since the last time: tokens by layer and expert over all ranks, int64 [layers, E], and this rank's
        part of the losses of balance, fp32 0-dim.
        """
        counts = torch.zeros(self.num_layers, self.num_experts, dtype=torch.int64, device=self.mesh.device)
        balance_loss = torch.zeros((), device=self.mesh.device)
        for layer, router in self.routers.items():
            counts[layer], loss = router.balance.take(self.mesh.device)
            balance_loss += loss
        for axis in ("dp_shard_cp", "dp_replicate", "pp"):
            if (group := self.mesh.groups.get(axis)) is not None and group.size() > 1:
                dist.all_reduce(counts, group=group)
        return counts, balance_loss

    @torch.no_grad()
    def move_biases(self, counts: Tensor) -> None:
        """Up by the update rate where an expert had fewer tokens than the mean of its layer, down where it had more
        (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). counts: as `take` gives them.
        """
        for layer, router in self.routers.items():
            if router.selection_bias is not None:
                own = counts[layer].double()
                router.selection_bias.add_((own.mean() - own).sign(), alpha=router.shape.bias_update_rate)
