"""A weight that the first and the last stage of a pipeline share, as tied embeddings do: one parameter, and a copy.

The first stage's rank holds the parameter: its master, its gradient, its optimizer state, and what checkpoints hold.
The last stage's rank has a copy, cut and sharded alike, with nothing of its own: before each forward it takes the
parameter's values, and after each backward its gradient is added to the parameter's. So the two are always equal, and
the gradient is the sum over both uses, as in one process. It costs what summing gradients over both ranks would
(Megatron-LM, arXiv 1909.08053, section 3): each rank's shard there and back, once a step. Where one rank holds both
stages, as under V schedules, nothing travels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.models.protocol import HasTiedStages
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharding import local_of


def copies_in(stage: nn.Module) -> Mapping[str, str]:
    """Parameters of a stage that are copies, by name, and the names of what they copy."""
    return stage.tied if isinstance(stage, HasTiedStages) else {}


class TiedCopies:
    """The parameters, or the copies, or both, that this rank has of what first and last stage share."""

    def __init__(
        self, copies: Mapping[str, str], first: nn.Module | None, last: nn.Module | None, mesh: Mesh, last_rank: int
    ) -> None:
        """copies: of the last stage, see `copies_in`. first, last: those stages, sharded, where this rank holds them.
        last_rank: pipeline rank of the last one; the first one is on rank 0.
        """
        self._group, self._device, self._last_rank = mesh.groups["pp"], mesh.device, last_rank
        names = sorted(copies)
        self._sources = None if first is None else [first.get_parameter(copies[name]) for name in names]
        self._copies = None if last is None else [last.get_parameter(name) for name in names]

    @torch.no_grad()
    def take_weights(self) -> None:
        """Gives the copies the values of what they copy; all ranks of the pipeline call this together."""
        if self._sources is not None and self._copies is not None:
            for source, copy in zip(self._sources, self._copies, strict=True):
                local_of(copy).copy_(local_of(source))
        elif self._sources is not None:
            for source in self._sources:
                self._send(local_of(source), self._last_rank)
        elif self._copies is not None:
            for copy in self._copies:
                local_of(copy).copy_(self._receive(local_of(copy), 0))

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Adds the copies' gradients to those of what they copy, and drops them; all ranks together."""
        if self._sources is not None and self._copies is not None:
            for source, copy in zip(self._sources, self._copies, strict=True):
                _gradient(source).add_(_gradient(copy))
        elif self._copies is not None:
            for copy in self._copies:
                self._send(_gradient(copy), 0)
        elif self._sources is not None:
            for source in self._sources:
                gradient = _gradient(source)
                gradient.add_(self._receive(gradient, self._last_rank).to(gradient.device))
        for copy in self._copies or ():
            copy.grad = None

    def _send(self, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            dist.send(tensor.to(self._device).contiguous(), group=self._group, group_dst=rank)

    def _receive(self, like: Tensor, rank: int) -> Tensor:
        received = torch.empty_like(like, device=self._device, memory_format=torch.contiguous_format)
        if received.numel():
            dist.recv(received, group=self._group, group_src=rank)
        return received


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every step's loss depends on both uses"
    return local_of(parameter.grad)
