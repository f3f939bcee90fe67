"""Communication of sharded weights and gradients beside the computation of the layers.

Weights: while a block computes, the next one's are gathered, in forward by the order of the blocks, in backward by the
order in which forward ran. Gradients: a block's are reduced while backward goes on in the block before it.

On a GPU both happen on streams of their own, which FSDP2 sees to. On a CPU there are no streams: there each collective
runs in a thread of the backend, and this module keeps what is on its way and waits for it no sooner than it is needed.
A block's reduction is awaited when the next block's begins, so that no more buffers exist at once than one after
another would need; that over replicas, which needs none, when the gradients are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor

from phalanx.models.experts import Experts
from phalanx.parallel.sharding import local_of


def prefetch(root: nn.Module, blocks: Sequence[nn.Module], *, in_threads: bool) -> None:
    """Gather ahead in forward and backward of `root`, whose blocks run in this order, and where experts are sharded
    apart from their block, them too. in_threads: by threads of the backend rather than on streams.
    """
    stops = [root, *blocks]
    for module, following in zip(stops, [*blocks, None], strict=True):
        assert isinstance(module, FSDPModule), "shard() comes first"
        experts = [] if module is root else _experts_apart(module)
        ahead = [*experts, *([following] if isinstance(following, FSDPModule) else [])]
        module.set_modules_to_forward_prefetch(ahead)
    if in_threads:
        for inner in root.modules():
            if isinstance(inner, FSDPModule):
                inner._set_unshard_async_op(True)


def _experts_apart(block: nn.Module) -> list[FSDPModule]:
    return [inner for inner in block.modules() if isinstance(inner, Experts) and isinstance(inner, FSDPModule)]


@dataclass(slots=True)
class _Arriving:
    """Parts of a block's gradients on their way: received [n, elements], output [elements] their sum to be."""

    work: dist.Work
    received: Tensor
    sent: Tensor
    output: Tensor
    goes_on: bool = False


class Reductions(DefaultReduceScatter):
    """Reductions of one stage's fp32 gradients on a CPU, each beside the backward that follows it.

    A reduce-scatter is an all-to-all and a sum in the order of the ranks: gloo's own sends twice as much (it reduces
    all to all). What is summed in another type is awaited at once, since FSDP2 then converts it at once.
    """

    def __init__(self, root: nn.Module, replicas: dist.ProcessGroup | None) -> None:
        """root: sharded within one replica, and materialised. replicas: over which its gradients are summed as well."""
        self._parameters = [each for each in root.parameters() if isinstance(each, DTensor)]
        self._replicas = replicas
        self._arriving: _Arriving | None = None
        self._over_replicas: list[dist.Work] = []
        self._sums: dict[nn.Parameter, Tensor] = {}
        for inner in root.modules():
            if isinstance(inner, FSDPModule):
                inner.set_custom_reduce_scatter(self)
                if replicas is not None:
                    inner.set_all_reduce_hook(self._sum_over_replicas)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the next reduction; the buffers of the one before are free first."""
        self._arrive()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        """Begins the sum over the group of [n * elements], of which this rank gets [elements]; see `finish`."""
        work: dist.Work
        if input_tensor.dtype != torch.float32:
            work = dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=True)
            work.wait()
            return work
        assert op == dist.ReduceOp.SUM, "gradients are sums"
        received = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(received, input_tensor, group=group, async_op=True)
        self._arriving = _Arriving(work, received.view(group.size(), -1), input_tensor, output_tensor)
        return work

    def _sum_over_replicas(self, output: Tensor) -> None:
        """What FSDP2 calls with each block's sum over the shards, which may still be on its way."""
        if self._arriving is not None and self._arriving.output is output:
            self._arriving.goes_on = True
        elif output.dtype == torch.float32:
            self._begin_over_replicas(output)
        else:
            dist.all_reduce(output, group=self._replicas)

    def _begin_over_replicas(self, output: Tensor) -> None:
        self._over_replicas.append(dist.all_reduce(output, group=self._replicas, async_op=True))

    def _arrive(self) -> None:
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.work.wait()
            torch.sum(arriving.received, 0, out=arriving.output)
            if arriving.goes_on:
                self._begin_over_replicas(arriving.output)

    def settle(self) -> None:
        """Before each backward: what earlier ones reduced is whole and put aside, for FSDP2 would add to it what is
        still on its way.
        """
        self._wait()
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if parameter in self._sums:
                local_of(self._sums[parameter]).add_(local_of(parameter.grad))
            else:
                self._sums[parameter] = parameter.grad
            parameter.grad = None

    def finish(self) -> None:
        """After the last backward: `grad` of every parameter is whole, and the sum over all."""
        self._wait()
        if self._sums:
            self.settle()
        for parameter, total in self._sums.items():
            parameter.grad = total
        self._sums.clear()

    def _wait(self) -> None:
        self._arrive()
        for work in self._over_replicas:
            work.wait()
        self._over_replicas.clear()
