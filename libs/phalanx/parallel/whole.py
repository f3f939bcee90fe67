"""Data parallelism of ranks that each hold all weights in the type that they are computed in: nothing is gathered,
nothing copied, and gradients are summed over the replicas while backward goes on.

fully_shard copies every weight into a buffer to gather it from, and every gradient into one to reduce it from, at any
number of ranks. Where there is one part and one type, parameters stay what they are, and what travels is the gradients
that autograd made: a large one from where it lies, small ones together (Li et al. 2020, "PyTorch Distributed",
arXiv 2006.15704, section 3.2, without its copies of large ones).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.parallel.mesh import Mesh
from phalanx.planner.job_search import run_shape
from phalanx.planner.whole import holds_whole
from phalanx.spec import Job, Layout

BUCKET_BYTES = 4 << 20


def is_whole(job: Job, layout: Layout) -> bool:
    """Whether ranks hold their weights so instead of by fully_shard."""
    return holds_whole(layout, run_shape(job)) and not job.parallel.cpu_offload


def materialise_whole(root: nn.Module, device: torch.device) -> None:
    """Allocate parameters and buffers, uninitialised. A parameter of several names stays one."""
    first: dict[int, str] = {}
    named = list(root.named_parameters(remove_duplicate=False))
    also = [(name, found) for name, p in named if (found := first.setdefault(id(p), name)) != name]
    root.to_empty(device=device)
    for name, found in also:
        holder, _, leaf = name.rpartition(".")
        setattr(root.get_submodule(holder), leaf, root.get_parameter(found))


@dataclass(slots=True)
class _Bucket:
    """Gradients that travel together. missing: parameters without one in this step so far."""

    parameters: list[nn.Parameter]
    missing: int = 0
    flat: Tensor | None = None
    work: dist.Work | None = field(default=None, repr=False)

    def launch(self, group: dist.ProcessGroup) -> None:
        """Begin the sum; a parameter that the loss did not depend on counts as zeros."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        alone = len(gradients) == 1 and gradients[0].is_contiguous()
        self.flat = gradients[0] if alone else torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def settle(self) -> None:
        """Wait for the sum and put it where the gradients are."""
        assert self.work is not None and self.flat is not None, "launch() comes first"
        self.work.wait()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.flat is not gradients[0]:
            parts = torch.split(self.flat, [gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
        self.work = self.flat = None


class ReplicaSums:
    """Sums the gradients of `parameters` over `group`, from the last micro-batch's backward on: each bucket as soon as
    it and all before it are complete, so that all ranks sum in one order, from the model's end to its begin.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets = [_Bucket(each) for each in buckets_of([p for p in parameters if p.requires_grad])]
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0
        self._is_armed = False
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]

    def begin(self, *, is_last: bool) -> None:
        """Before the backward of a micro-batch."""
        self._is_armed, self._next = is_last, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def finish(self) -> None:
        """Behind the last backward: every gradient is its sum over the replicas."""
        for bucket in self._buckets[self._next :]:
            bucket.launch(self._group)
        self._is_armed, self._next = False, 0
        for bucket in self._buckets:
            bucket.settle()

    def _made(self, parameter: Tensor) -> None:
        if not self._is_armed:
            return
        self._bucket_of[id(parameter)].missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._buckets[self._next].launch(self._group)
            self._next += 1


def buckets_of(parameters: Sequence[nn.Parameter], least_bytes: int = BUCKET_BYTES) -> list[list[nn.Parameter]]:
    """Parameters from the last to the first, as many together as reach `least_bytes`; those of at least so much travel
    alone.
    """
    found: list[list[nn.Parameter]] = []
    waiting: list[nn.Parameter] = []
    for parameter in reversed(parameters):
        if parameter.nbytes >= least_bytes:
            found.append([parameter])
            continue
        waiting.append(parameter)
        if sum(each.nbytes for each in waiting) >= least_bytes:
            found.append(waiting)
            waiting = []
    return [*found, waiting] if waiting else found


def hold_whole(modules: Sequence[nn.Module], job: Job, mesh: Mesh) -> ReplicaSums | None:
    """Allocate the modules on the mesh's device; what then sums their gradients over the replicas, None where there is
    one, or each is to keep its own.
    """
    for module in modules:
        materialise_whole(module, mesh.device)
    if job.has_apart_replicas or mesh.replica_group is None:
        return None
    return ReplicaSums([p for module in modules for p in module.parameters()], mesh.replica_group)
