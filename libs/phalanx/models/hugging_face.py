"""The built-in decoder in Hugging Face's Llama format and back: parameter names and `config.json`.

Both sides rotate the two halves of a head against each other, so that weights carry over as they are: no permutation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs

ARCHITECTURE = "LlamaForCausalLM"
INDEX_NAME = "model.safetensors.index.json"  # names the file of each tensor, where there are several
_TOP = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_CONFIG = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}


def name_to_hugging_face(name: str) -> str:
    """A parameter's name there; PhalanxError for a name that the decoder doesn't have."""
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name):
        layer, module = match.groups()
        if module in _BLOCK:
            return f"model.layers.{layer}.{_BLOCK[module]}.weight"
    elif (module := name.removesuffix(".weight")) in _TOP:
        return f"{_TOP[module]}.weight"
    raise _unknown(name)


def name_from_hugging_face(name: str) -> str:
    """A parameter's name here; PhalanxError for a name that isn't Llama's."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name):
        layer, module = match.groups()
        for ours, theirs in _BLOCK.items():
            if theirs == module:
                return f"layers.{layer}.{ours}.weight"
    for ours, theirs in _TOP.items():
        if name == f"{theirs}.weight":
            return f"{ours}.weight"
    raise _unknown(name)


def _unknown(name: str) -> PhalanxError:
    return PhalanxError(
        "parameter name",
        value=name,
        expected="a parameter of a Llama-style decoder",
        remedy="only the built-in decoder maps to Hugging Face's Llama; export your own model by your own mapping",
    )


def config_to_hugging_face(
    args: DecoderArgs, *, max_position_embeddings: int, dtype: str = "float32"
) -> dict[str, Any]:
    """The content of `config.json` for transformers' LlamaForCausalLM.

    max_position_embeddings: the sequence length trained with, in tokens. dtype: of the exported weights.
    """
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{theirs: getattr(args, ours) for ours, theirs in _CONFIG.items()},
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": args.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta},
        "dtype": dtype,
    }


def config_from_hugging_face(config: Mapping[str, Any]) -> DecoderArgs:
    """The decoder's shape from the content of a Llama `config.json`; PhalanxError for what the decoder can't
    compute.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    default_head_dim = config["hidden_size"] // config["num_attention_heads"]
    requirements = {
        "model_type": (config.get("model_type"), "llama"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "head_dim": (config.get("head_dim") or default_head_dim, default_head_dim),
    }
    for key, (value, expected) in requirements.items():
        if value != expected:
            raise PhalanxError(
                f"config.json {key}", value=value, expected=repr(expected), remedy="the decoder can't load this model"
            )
    fallback = {"num_key_value_heads": config["num_attention_heads"], "tie_word_embeddings": False}
    shape = {ours: config.get(theirs, fallback.get(theirs)) for ours, theirs in _CONFIG.items()}
    return DecoderArgs(**shape, rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
