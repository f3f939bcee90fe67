"""Named model shapes for `[model] preset`; a key in `[model.args]` overrides the preset's, and the resolved shape is
the identity.

llama3-*: sizes of Llama 3 (arXiv 2407.21783, table 3) and Llama 3.2 1B. gpt3-175b: depth, width and heads of GPT-3
(arXiv 2005.14165, table 2.1) with Llama-style blocks and a SwiGLU of the same size as its MLP. mixtral-8x7b: arXiv
2401.04088, table 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def _shape(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int, vocab_size: int, **more: Any
) -> Mapping[str, Any]:
    shape = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "vocab_size": vocab_size}
    return MappingProxyType({**shape, **({"ffn_dim": ffn_dim} if ffn_dim else {}), **more})


def _llama3(dim: int, n_layers: int, n_heads: int, ffn_dim: int, **more: Any) -> Mapping[str, Any]:
    return _shape(dim, n_layers, n_heads, 8, ffn_dim, 128_256, rope_theta=500_000.0, **more)


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": _shape(64, 2, 4, 2, 192, 512),
        "demo": _shape(128, 4, 4, 2, 384, 4096),
        "llama3-1b": _llama3(2048, 16, 32, 8192, tie_embeddings=True),
        "llama3-8b": _llama3(4096, 32, 32, 14_336),
        "llama3-70b": _llama3(8192, 80, 64, 28_672),
        "llama3-405b": _llama3(16_384, 126, 128, 53_248),
        "gpt3-175b": _shape(12_288, 96, 96, 96, 32_768, 51_200),
        "mixtral-8x7b": _shape(
            4096,
            32,
            32,
            8,
            0,
            32_000,
            rope_theta=1_000_000.0,
            moe=MappingProxyType({"num_experts": 8, "top_k": 2, "expert_ffn_dim": 14_336}),
        ),
    }
)
