"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv 2412.19437, section
2.1.1): keys and values of all heads come from one narrow latent a token, and positions turn a part of each query and
one key that all heads share.

Under tensor parallelism the latents and their norms are whole on every rank, and heads are cut. Ranks of a context that
gather keys exchange latents, which are far narrower than keys and values, and each makes keys and values of the whole
window from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.models.args import DecoderArgs
from phalanx.models.attention import Attend
from phalanx.models.norm import RMSNorm
from phalanx.models.rotary import rotate_neighbours

# Of the norms of latents, whatever norm_eps is: as DeepSeek's code and transformers have it.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Self-attention from latents; the names of its sizes are those of `[model.args.mla]`."""

    def __init__(self, args: DecoderArgs, attend: Attend) -> None:
        super().__init__()
        assert args.mla is not None, "Attention serves others"
        self.shape, self.attend, self.scale = args.mla, attend, args.softmax_scale
        mla, width = args.mla, args.n_heads * args.head_dim
        self.wq = self.wq_a = self.q_a_norm = self.wq_b = None
        if mla.q_lora_rank:
            self.wq_a = nn.Linear(args.dim, mla.q_lora_rank, bias=False)
            self.q_a_norm = RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS)
            self.wq_b = nn.Linear(mla.q_lora_rank, width, bias=False)
        else:
            self.wq = nn.Linear(args.dim, width, bias=False)
        self.wkv_a = nn.Linear(args.dim, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=False)
        self.kv_a_norm = RMSNorm(mla.kv_lora_rank, LATENT_NORM_EPS)
        self.wkv_b = nn.Linear(mla.kv_lora_rank, args.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False)
        self.wo = nn.Linear(args.n_heads * mla.v_head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Any) -> Tensor:
        """x [B, S, D]; cosines, sines [B, 1, S, qk_rope_head_dim]; heads as many as the weights hold. mask: from
        `attend`.
        """
        mla = self.shape
        query, rotated = torch.split(
            self._heads(self._queries(x)), [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1
        )
        query = torch.cat((query, rotate_neighbours(rotated, cosines, sines)), dim=-1)
        latents = [mla.kv_lora_rank, mla.qk_rope_head_dim]
        latent, shared = torch.split(self.wkv_a(x), latents, dim=-1)
        shared = rotate_neighbours(shared.unsqueeze(1), cosines, sines).squeeze(1)
        seen = self.attend.gather(torch.cat((self.kv_a_norm(latent), shared), dim=-1))
        latent, shared = torch.split(seen, latents, dim=-1)
        key, value = torch.split(self._heads(self.wkv_b(latent)), [mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
        key = torch.cat((key, shared.unsqueeze(1).expand(-1, key.shape[1], -1, -1)), dim=-1)
        y = self.attend.of_gathered(query, key, value, mask, self.scale)
        return self.wo(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    @property
    def num_heads(self) -> int:
        """Heads that this rank's weights hold."""
        return self.wkv_b.weight.shape[0] // (self.shape.qk_nope_head_dim + self.shape.v_head_dim)

    @property
    def num_kv_heads(self) -> int:
        """As many: each head has keys and values of its own."""
        return self.num_heads

    def _queries(self, x: Tensor) -> Tensor:
        if self.wq is not None:
            return self.wq(x)  # type: ignore[no-any-return]
        assert self.wq_a is not None and self.q_a_norm is not None and self.wq_b is not None, "made together"
        return self.wq_b(self.q_a_norm(self.wq_a(x)))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
