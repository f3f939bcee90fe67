"""Context parallelism: the ranks of the cp axis share every window.

A window is cut into 2 cp chunks, of which rank i has number i and number 2 cp - 1 - i, so that each rank has the same
work under a causal mask (Llama 3, arXiv 2407.21783, section 3.3.2). Attention sees whole windows in one of two ways:
keys and values of all ranks are gathered to each (the same section); or an all-to-all gives each rank whole windows of
some of the heads, and a second one their results back (DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.collectives import gather_sequence


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, x.contiguous(), group=group)
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of each of n ranks: part j of rank i becomes part i of rank j. Its backward is itself."""
    return _AllToAll.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def spans_of(length: int, cp: int, rank: int) -> tuple[range, range]:
    """The two parts of a window of `length` tokens that rank `rank` of `cp` has, first to last."""
    chunk, rest = divmod(length, 2 * cp)
    assert not rest, "the job file's own checks refuse it"
    first, second = rank * chunk, (2 * cp - 1 - rank) * chunk
    return range(first, first + chunk), range(second, second + chunk)


class ContextShare:
    """One rank's share of every window; see `phalanx.models.protocol.Context`."""

    def __init__(self, group: dist.ProcessGroup, length: int, method: str) -> None:
        """length: tokens of a whole window. method: of `[parallel] cp_comm_type`."""
        self._group, self.length, self.method = group, length, method
        self.num_ranks = group.size()
        self.spans = spans_of(length, self.num_ranks, group.rank())
        # Chunks in the order of the ranks, as exchanges bring them: which place each chunk of the window has there.
        order = [chunk for rank in range(self.num_ranks) for chunk in (rank, 2 * self.num_ranks - 1 - rank)]
        self._place_of_chunk = [order.index(chunk) for chunk in range(len(order))]
        self._chunk_at_place = order

    def take(self, x: Tensor) -> Tensor:
        """Of x [B, S] this rank's [B, S / cp]."""
        return torch.cat([x[:, span.start : span.stop] for span in self.spans], dim=1)

    def gather(self, x: Tensor) -> Tensor:
        """See `Context`."""
        return _reordered(gather_sequence(x, self._group), self._place_of_chunk, dim=1)

    def sum(self, x: Tensor) -> Tensor:
        """See `Context`."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self._group)
        return total

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """See `Context`; one exchange for all."""
        cut = [_split(t, 1, self.num_ranks) for t in tensors]
        found = all_to_all(torch.cat(cut, dim=2), self._group)
        whole = [part.movedim(0, 2).flatten(2, 3) for part in found.split([t.shape[2] for t in cut], dim=2)]
        return [_reordered(t, self._place_of_chunk, dim=2) for t in whole]

    def to_sequence(self, x: Tensor) -> Tensor:
        """See `Context`."""
        by_rank = _split(_reordered(x, self._chunk_at_place, dim=2), 2, self.num_ranks)
        exchanged: Tensor = all_to_all(by_rank, self._group)
        return exchanged.movedim(0, 1).flatten(1, 2)


def _split(x: Tensor, dim: int, num_parts: int) -> Tensor:
    """x cut into equal parts along `dim`, in a new first dimension."""
    return torch.stack(x.chunk(num_parts, dim))


def _reordered(x: Tensor, order: list[int], dim: int) -> Tensor:
    """x cut into as many parts along `dim` as `order` has, part order[i] in place i."""
    parts = x.chunk(len(order), dim)
    return torch.cat([parts[place] for place in order], dim)
