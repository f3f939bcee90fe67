"""Named model shapes for `[model] preset`; a key in `[model.args]` overrides the preset's, and the resolved shape is
the identity.

llama3-*: sizes of Llama 3 (arXiv 2407.21783, table 3) and of Llama 3.2 1B, with rotary frequencies as they are trained
from the start. llama3.1-* and llama3.2-*: the same, scaled for windows of 131,072 tokens as their public config.json
has it: what to import released weights into. qwen3-*: dense Qwen3 (arXiv 2505.09388, table 1, and its public
config.json). gpt3-175b: depth, width and heads of GPT-3 (arXiv 2005.14165, table 2.1) with Llama-style blocks and a
SwiGLU of the same size as its MLP. mixtral-8x7b: arXiv 2401.04088, table 1; mixtral-8x22b: its public config.json.
qwen3-30b-a3b, qwen3-235b-a22b: arXiv 2505.09388, table 2. The weight of their loss of balance is for ours, which is
added up over the layers (docs/decisions/expert-balance.md).
deepseek-v3: arXiv 2412.19437, section 4.2, and its public config.json, scaled for windows of 163,840 tokens, without
the module that predicts a second token. NAME-tiny: all that llama3.1-8b, qwen3-8b, mixtral-8x7b, qwen3-30b-a3b and
deepseek-v3 have, in a model for tests.
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


def _scaled(shape: Mapping[str, Any], factor: float, window: int = 8192) -> Mapping[str, Any]:
    """A Llama 3 whose windows were made longer than `window` later."""
    scaling = {
        "type": "llama3",
        "factor": factor,
        "original_max_position_embeddings": window,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    return MappingProxyType({**shape, "rope_scaling": MappingProxyType(scaling)})


def _qwen3(dim: int, n_layers: int, n_heads: int, ffn_dim: int, *, tied: bool) -> Mapping[str, Any]:
    tie = {"tie_embeddings": True} if tied else {}
    return _shape(dim, n_layers, n_heads, 8, ffn_dim, 151_936, head_dim=128, **_QWEN3, **tie)


def _experts(num_experts: int, top_k: int, expert_ffn_dim: int) -> Mapping[str, Any]:
    """Scores by softmax, normalised over a token's experts: Mixtral's and Qwen3's router."""
    sizes = {"num_experts": num_experts, "top_k": top_k, "expert_ffn_dim": expert_ffn_dim}
    return MappingProxyType({**sizes, "aux_loss": 0.001})


def _deepseek_v3(
    shape: Mapping[str, Any], moe: Mapping[str, Any], latents: tuple[int, int, int, int, int], window: int
) -> Mapping[str, Any]:
    """latents: q_lora_rank, kv_lora_rank, and the widths of a head without positions, with them, and of its value.
    window: before it was scaled, in tokens. Balanced as its report says, section 4.2.
    """
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    choice = {"score": "sigmoid", "num_shared_experts": 1, "route_scale": 2.5, "selection_bias": True}
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": window}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    return MappingProxyType(
        {
            **shape,
            "norm_eps": 1e-6,
            "mla": MappingProxyType(dict(zip(names, latents, strict=True))),
            "moe": MappingProxyType({**choice, **moe, "aux_loss": 0.0001}),
            "rope_scaling": MappingProxyType(yarn),
        }
    )


_MIXTRAL: Mapping[str, Any] = MappingProxyType({"rope_theta": 1_000_000.0})
_QWEN3: Mapping[str, Any] = MappingProxyType({"qk_norm": True, "norm_eps": 1e-6, "rope_theta": 1_000_000.0})
_LLAMA3_1B = _llama3(2048, 16, 32, 8192, tie_embeddings=True)
_LLAMA3_8B = _llama3(4096, 32, 32, 14_336)
_LLAMA3_70B = _llama3(8192, 80, 64, 28_672)
_LLAMA3_405B = _llama3(16_384, 126, 128, 53_248)

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": _shape(64, 2, 4, 2, 192, 512),
        "demo": _shape(128, 4, 4, 2, 384, 4096),
        "llama3-tiny": _scaled(_shape(64, 2, 4, 2, 192, 512, rope_theta=500_000.0), 8.0, window=64),
        "qwen3-tiny": _shape(64, 2, 4, 2, 192, 512, head_dim=32, **_QWEN3),
        "llama3-1b": _LLAMA3_1B,
        "llama3-8b": _LLAMA3_8B,
        "llama3-70b": _LLAMA3_70B,
        "llama3-405b": _LLAMA3_405B,
        "llama3.1-8b": _scaled(_LLAMA3_8B, 8.0),
        "llama3.1-70b": _scaled(_LLAMA3_70B, 8.0),
        "llama3.1-405b": _scaled(_LLAMA3_405B, 8.0),
        "llama3.2-1b": _scaled(_LLAMA3_1B, 32.0),
        "llama3.2-3b": _scaled(_llama3(3072, 28, 24, 8192, tie_embeddings=True), 32.0),
        "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
        "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
        "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
        "qwen3-8b": _qwen3(4096, 36, 32, 12_288, tied=False),
        "qwen3-14b": _qwen3(5120, 40, 40, 17_408, tied=False),
        "qwen3-32b": _qwen3(5120, 64, 64, 25_600, tied=False),
        "gpt3-175b": _shape(12_288, 96, 96, 96, 32_768, 51_200),
        "mixtral-tiny": _shape(64, 2, 4, 2, 0, 512, **_MIXTRAL, moe=_experts(4, 2, 96)),
        "mixtral-8x7b": _shape(4096, 32, 32, 8, 0, 32_000, **_MIXTRAL, moe=_experts(8, 2, 14_336)),
        "mixtral-8x22b": _shape(6144, 56, 48, 8, 0, 32_768, **_MIXTRAL, moe=_experts(8, 2, 16_384)),
        "qwen3-moe-tiny": _shape(64, 2, 4, 2, 0, 512, head_dim=32, **_QWEN3, moe=_experts(8, 3, 48)),
        "qwen3-30b-a3b": _shape(2048, 48, 32, 4, 0, 151_936, head_dim=128, **_QWEN3, moe=_experts(128, 8, 768)),
        "qwen3-235b-a22b": _shape(4096, 94, 64, 4, 0, 151_936, head_dim=128, **_QWEN3, moe=_experts(128, 8, 1536)),
        "deepseek-v3-tiny": _deepseek_v3(
            _shape(64, 3, 4, 4, 160, 512),
            {"num_experts": 8, "top_k": 3, "expert_ffn_dim": 48, "num_groups": 4, "top_groups": 2, "first_k_dense": 1},
            (32, 24, 16, 8, 16),
            64,
        ),
        "deepseek-v3": _deepseek_v3(
            _shape(7168, 61, 128, 128, 18_432, 129_280),
            {"num_experts": 256, "top_k": 8, "expert_ffn_dim": 2048, "num_groups": 8, "top_groups": 4}
            | {"first_k_dense": 3},
            (1536, 512, 128, 64, 128),
            4096,
        ),
    }
)
