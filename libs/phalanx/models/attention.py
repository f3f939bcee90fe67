"""Grouped-query self-attention by one of several kernels, on whole windows or (context parallelism) on a rank's part of
each.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs
from phalanx.models.kernels import Kernel, Window
from phalanx.models.norm import RMSNorm
from phalanx.models.protocol import Context
from phalanx.models.rotary import rotate


class Attend(Protocol):
    """How the heads that a rank computed become its attention."""

    kernel: Kernel

    def mask(self, position_ids: Tensor, document_ids: Tensor | None) -> Any:
        """What `__call__` needs to know of a batch: position_ids [B, S] of this rank, document_ids of whole windows."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """As `Kernel`, of what this rank holds of the windows."""

    def gather(self, x: Tensor) -> Tensor:
        """What keys and values are made from, [B, S, ...] at the places of this rank, at those that `of_gathered` wants
        them at.
        """

    def of_gathered(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
        """As `__call__`, of keys and values made from what `gather` gave, with as many heads as the queries. scale:
        as in `Kernel`.
        """


class WholeWindows:
    """Attention of ranks that hold whole windows."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def mask(self, position_ids: Tensor, document_ids: Tensor | None) -> Any:
        """See `Attend`."""
        return self.kernel.mask(Window(position_ids.shape[0], position_ids.shape[1], position_ids.device, document_ids))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """See `Attend`."""
        return self.kernel(query, key, value, mask)

    def gather(self, x: Tensor) -> Tensor:
        """See `Attend`: the rank has all."""
        return x

    def of_gathered(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
        """See `Attend`."""
        return self.kernel(query, key, value, mask, scale)


class GatheredKeys:
    """Attention of a rank's part of the queries to keys and values gathered from all ranks of a context."""

    def __init__(self, kernel: Kernel, context: Context) -> None:
        self.kernel, self.context = kernel, context

    def mask(self, position_ids: Tensor, document_ids: Tensor | None) -> Any:
        """See `Attend`."""
        num_windows, length = position_ids.shape[0], self.context.length
        return self.kernel.mask(Window(num_windows, length, position_ids.device, document_ids, self.context.spans))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """See `Attend`."""
        both = self.gather(torch.cat((key, value), dim=1).transpose(1, 2))
        key, value = both.transpose(1, 2).chunk(2, dim=1)
        return self.kernel(query, key, value, mask)

    def gather(self, x: Tensor) -> Tensor:
        """See `Attend`."""
        return self.context.gather(x)

    def of_gathered(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
        """See `Attend`."""
        return self.kernel(query, key, value, mask, scale)


class ScatteredHeads:
    """Attention of whole windows by each rank of a context, for its part of the heads."""

    def __init__(self, kernel: Kernel, context: Context) -> None:
        self.kernel, self.context = kernel, context

    def mask(self, position_ids: Tensor, document_ids: Tensor | None) -> Any:
        """See `Attend`."""
        num_windows, length = position_ids.shape[0], self.context.length
        return self.kernel.mask(Window(num_windows, length, position_ids.device, document_ids))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """See `Attend`. Heads of keys and values that are fewer than the ranks go to each rank that needs them."""
        if (copies := self.context.num_ranks // key.shape[1]) > 1:
            key, value = (t.repeat_interleave(copies, dim=1) for t in (key, value))
        query, key, value = self.context.to_heads(query, key, value)
        return self.context.to_sequence(self.kernel(query, key, value, mask))

    def gather(self, x: Tensor) -> Tensor:
        """See `Attend`: heads are exchanged, not what they are made from."""
        return x

    def of_gathered(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
        """See `Attend`. One exchange for heads of different widths."""
        (heads,) = self.context.to_heads(torch.cat((query, key, value), dim=-1))
        query, key, value = torch.split(heads, [t.shape[-1] for t in (query, key, value)], dim=-1)
        return self.context.to_sequence(self.kernel(query, key, value, mask, scale))


def in_context(kernel: Kernel, context: Context) -> Attend:
    """Attention by the method of the context."""
    return GatheredKeys(kernel, context) if context.method == "all_gather" else ScatteredHeads(kernel, context)


def check_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """PhalanxError where the heads of one rank can't be dealt out to `num_ranks` ranks of a context."""
    if num_heads % num_ranks or (num_kv_heads % num_ranks and num_ranks % num_kv_heads):
        raise PhalanxError(
            "[parallel] cp",
            value=num_ranks,
            expected=f"with a2a a divisor of the {num_heads} heads of queries of a tp rank, and a divisor or a "
            f"multiple of its {num_kv_heads} of keys and values",
            remedy="change cp or tp, or choose cp_comm_type = all_gather",
        )


class Attention(nn.Module):
    """Grouped-query self-attention (arXiv 2305.13245). With `qk_norm` every head of the queries and keys is normalised
    before its rotation, by one weight for all heads (Qwen3, arXiv 2505.09388, section 2).
    """

    def __init__(self, args: DecoderArgs, attend: Attend) -> None:
        super().__init__()
        self.head_dim, self.attend = args.head_dim, attend
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.q_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.k_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else None

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Any) -> Tensor:
        """x [B, S, D]; heads as many as the weights hold. mask: from `attend`."""
        query, key, value = (self._heads(weight(x)) for weight in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        y = self.attend(query, key, value, mask)
        return self.wo(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    @property
    def num_heads(self) -> int:
        """Heads of queries that this rank's weights hold."""
        return self.wq.weight.shape[0] // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values that this rank's weights hold."""
        return self.wk.weight.shape[0] // self.head_dim

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
