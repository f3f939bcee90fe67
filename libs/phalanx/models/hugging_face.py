"""The built-in decoder in Hugging Face's Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE and DeepSeek-V3 formats and back:
parameter names and `config.json`.

Both sides rotate the two halves of a head against each other, and neighbours in latent attention, so that weights carry
over as they are: no permutation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from phalanx.core.errors import PhalanxError, Problems
from phalanx.models.args import DecoderArgs, RopeScaling
from phalanx.models.config_keys import CANNOT, COPY, KINDS, LIST, NUMBER, TABLE, WHOLE, Keys
from phalanx.models.hugging_face_deepseek import LATENT_NAMES, MODEL_TYPE, ONLY, WHY, deepseek_keys, deepseek_shape
from phalanx.models.hugging_face_experts import (
    FORMS,
    expert_name_from,
    expert_name_to,
    moe_from,
    moe_keys,
    require_form,
)
from phalanx.spec.model import ROPE_SCALING_KEYS

INDEX_NAME = "model.safetensors.index.json"  # names the file of each tensor, where there are several
_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.wq.bias": "self_attn.q_proj.bias",
    "attention.wk.bias": "self_attn.k_proj.bias",
    "attention.wv.bias": "self_attn.v_proj.bias",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    **LATENT_NAMES,
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}
_BLOCK_BACK = {theirs: ours for ours, theirs in _BLOCK.items()}
_CONFIG = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}


@dataclass(frozen=True, slots=True)
class _Family:
    """A model of transformers that the decoder computes. only: what further keys must say, which is also what
    transformers takes where they say nothing. kv_heads, head_dim: what it takes where nothing is said; None: as many as
    heads, hidden_size over heads. rope_theta: likewise.
    """

    model_type: str
    architecture: str
    only: Mapping[str, object]
    kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    rope_theta: float = 10000.0


_FAMILIES: Final = {
    family.model_type: family
    for family in (
        _Family("llama", "LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}),
        _Family("qwen2", "Qwen2ForCausalLM", {"use_sliding_window": False}, kv_heads=32, qkv_bias=True),
        _Family(
            "qwen3",
            "Qwen3ForCausalLM",
            {"attention_bias": False, "use_sliding_window": False},
            kv_heads=32,
            head_dim=128,
            qk_norm=True,
        ),
        _Family("mixtral", "MixtralForCausalLM", {"sliding_window": None}, kv_heads=8, rope_theta=1e6),
        _Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            {"attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1},
            kv_heads=4,
            qk_norm=True,
        ),
        _Family(MODEL_TYPE, "DeepseekV3ForCausalLM", ONLY, kv_heads=128),
    )
}
_MAGNITUDES: Final = ("mscale", "mscale_all_dim")
_WHY: Final = {
    "hidden_act": "the feed-forward is SwiGLU",
    "attention_bias": "the output of attention has no bias here; those of queries, keys and values alone are Qwen2's",
    "mlp_bias": "the feed-forward has no biases here",
    "use_sliding_window": "every token sees all earlier ones here",
    "sliding_window": "every token sees all earlier ones here",
    "decoder_sparse_step": "every layer has experts here",
    **WHY,
    "quantization_config": "weights are trained as they are",
    "original_max_position_embeddings": "it belongs into rope_scaling",
}


def name_to_hugging_face(name: str, model_type: str = "llama") -> str:
    """A parameter's name in a model of that type there; PhalanxError for a name that the decoder doesn't have."""
    if (match := re.fullmatch(r"layers\.(\d+)\.(.+)", name)) and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}"
    if name in _TOP:
        return _TOP[name]
    if (found := expert_name_to(name, model_type)) is not None:
        return found
    raise _unknown(name)


def name_from_hugging_face(name: str) -> str:
    """A parameter's name here; PhalanxError for a name that isn't of one of the families."""
    if (match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)) and match[2] in _BLOCK_BACK:
        return f"layers.{match[1]}.{_BLOCK_BACK[match[2]]}"
    if name in _TOP_BACK:
        return _TOP_BACK[name]
    if (found := expert_name_from(name)) is not None:
        return found
    raise _unknown(name)


def _unknown(name: str) -> PhalanxError:
    return PhalanxError(
        "parameter name",
        value=name,
        expected="a parameter of a decoder like Llama, Qwen, Mixtral or DeepSeek-V3",
        remedy="only the built-in decoder maps to Hugging Face's; export your own model by your own mapping",
    )


def config_to_hugging_face(
    args: DecoderArgs, *, max_position_embeddings: int, dtype: str = "float32"
) -> dict[str, Any]:
    """The content of `config.json` for transformers' Llama, Qwen2 (qkv_bias), Qwen3 (qk_norm), Mixtral (moe),
    Qwen3-MoE (qk_norm and moe) or DeepSeek-V3 (mla).

    max_position_embeddings: the sequence length trained with, in tokens. dtype: of the exported weights. Raises
    PhalanxError for a shape that none of them has.
    """
    family = _family_of(args)
    rope: dict[str, Any] = {"rope_type": "default"}
    if args.rope_scaling is not None:
        said = {name: value for name, value in asdict(args.rope_scaling).items() if value is not None}
        rope = {"rope_type": said.pop("type"), **said}
        if args.rope_scaling.type == "yarn":
            # Some versions 4 of transformers divide it by the original one instead of reading the factor.
            max_position_embeddings = round(said["factor"] * said["original_max_position_embeddings"])
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{theirs: getattr(args, ours) for ours, theirs in _CONFIG.items()},
        "hidden_act": "silu",
        **family.only,
        **_further_keys(args, family.model_type),
        "attention_dropout": 0.0,
        "max_position_embeddings": max_position_embeddings,
        # transformers 4 reads these two, transformers 5 the third (or the second, where it is not null).
        "rope_theta": args.rope_theta,
        "rope_scaling": None if args.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": args.rope_theta},
        "dtype": dtype,
    }


def _further_keys(args: DecoderArgs, model_type: str) -> dict[str, Any]:
    if model_type == MODEL_TYPE:
        return deepseek_keys(args)
    return {} if args.moe is None else moe_keys(args.moe, model_type)


def _family_of(args: DecoderArgs) -> _Family:
    if args.qk_norm and args.qkv_bias:
        raise PhalanxError(
            "[model.args] qkv_bias",
            value=True,
            expected="false beside qk_norm: no model of transformers has these biases and normalised heads",
            remedy="convert it with phalanx.snapshot.load",
        )
    if args.mla is not None:
        return _FAMILIES[MODEL_TYPE]
    if args.moe is not None:
        return _FAMILIES[require_form(args.moe, qk_norm=args.qk_norm, qkv_bias=args.qkv_bias)]
    family = _FAMILIES["qwen3" if args.qk_norm else "qwen2" if args.qkv_bias else "llama"]
    if family.model_type == "llama" and args.dim % args.n_heads:
        raise PhalanxError(
            "[model.args] dim",
            value=args.dim,
            expected=f"a multiple of n_heads ({args.n_heads}): transformers opens no other Llama, with any head_dim",
            remedy="convert it with phalanx.snapshot.load",
        )
    return family


def config_from_hugging_face(config: object, where: str = "config.json") -> DecoderArgs:
    """The decoder's shape from the content of a `config.json` of one of the families, which `where` names in errors.

    Raises Problems that list every key with a value that is none, and all that the decoder can't compute.
    """
    read = Keys(where, config)
    family = _FAMILIES.get(str(read.value("model_type")))
    if family is None:
        read.refuse("model_type", read.value("model_type"), f"one of {', '.join(_FAMILIES)}", CANNOT)
        family = _FAMILIES["llama"]
    _require_what_is_built(read, family)
    heads = read.of(WHOLE, "num_attention_heads")
    dim = read.of(WHOLE, "hidden_size")
    says_kv_heads = family.kv_heads is None or "num_key_value_heads" in read.config
    kv_heads = read.of(WHOLE, "num_key_value_heads", heads or 1 if says_kv_heads else family.kv_heads)
    head_dim = read.of(WHOLE, "head_dim", family.head_dim or (dim // heads if dim and heads else 2) or 1)
    shape: dict[str, Any] = {
        ours: read.of(KINDS.get(theirs, WHOLE), theirs, False if theirs == "tie_word_embeddings" else None)
        for ours, theirs in _CONFIG.items()
        if ours not in ("dim", "n_heads", "n_kv_heads", "head_dim", "ffn_dim" if family.model_type in FORMS else "")
    }
    further = _further_shape(read, family.model_type)
    rope_theta, rope_scaling = _rope(read, family)
    _require_heads_that_fit(read, family, dim, heads, kv_heads, head_dim)
    if read.problems:
        raise Problems(where, read.problems)
    shape |= {"dim": dim, "n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head_dim}
    shape |= {"norm_eps": float(shape["norm_eps"]), "rope_theta": rope_theta, "rope_scaling": rope_scaling}
    return DecoderArgs(**shape | further, qk_norm=family.qk_norm, qkv_bias=family.qkv_bias)


def _further_shape(read: Keys, model_type: str) -> dict[str, Any]:
    """What a family has beside the shape of all: experts and latents, and the widths that they change."""
    if model_type == MODEL_TYPE:
        return {"head_dim": 0, **deepseek_shape(read)}
    return {"ffn_dim": 0, "moe": moe_from(read, model_type)} if model_type in FORMS else {}


def _require_heads_that_fit(
    read: Keys, family: _Family, dim: int | None, heads: int | None, kv_heads: int | None, head_dim: int | None
) -> None:
    """Notes widths and numbers of heads that do not fit each other; None: one that is wrong by itself."""
    needs_multiple = family.model_type == "llama" or (family.head_dim is None and read.value("head_dim") is None)
    if family.model_type == MODEL_TYPE:
        if heads is not None and kv_heads not in (heads, None):
            read.refuse("num_key_value_heads", kv_heads, f"num_attention_heads ({heads})", CANNOT)
        return
    if dim is not None and heads is not None and needs_multiple and dim % heads:
        read.refuse("hidden_size", dim, f"a multiple of num_attention_heads ({heads})", CANNOT)
    elif head_dim is not None and head_dim % 2:
        read.refuse("head_dim", head_dim, "an even width: rotary positions turn pairs", CANNOT)
    if heads is not None and kv_heads is not None and heads % kv_heads:
        read.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})", CANNOT)


def _require_what_is_built(read: Keys, family: _Family) -> None:
    """Notes what transformers would compute otherwise than the decoder, by the names of its keys."""
    for key, only in {"hidden_act": "silu", **family.only}.items():
        found = read.value(key, only)
        if type(found) is not type(only) or found != only:
            read.refuse(key, found, f"{only!r}: {_WHY[key]}", CANNOT)
    for key in ("quantization_config", "original_max_position_embeddings"):
        if read.value(key) is not None:
            read.refuse(key, read.value(key), f"null: {_WHY[key]}", CANNOT)
    kinds = read.of(LIST, "layer_types", [])
    for kind in sorted({str(kind) for kind in kinds or ()} - {"full_attention"}):
        read.refuse("layer_types", kind, f"full_attention in every layer: {_WHY['use_sliding_window']}", CANNOT)
    _require_whole_rotation(read, "partial_rotary_factor", read.value("partial_rotary_factor", 1.0))


def _require_whole_rotation(read: Keys, key: str, share: object) -> None:
    if isinstance(share, bool) or share != 1:
        read.refuse(key, share, "1: every pair of a head is rotated", CANNOT)


def _rope(read: Keys, family: _Family) -> tuple[float, RopeScaling | None]:
    """The base of the rotary angles and how they are scaled, from the tables of transformers 4 and 5.

    The base in a table goes before that of the top level, and that of `rope_scaling` first, as transformers has it.
    """
    theta = read.of(NUMBER, "rope_theta", family.rope_theta)
    found: dict[str, RopeScaling | None] = {}
    for name in ("rope_parameters", "rope_scaling"):
        table = read.of(TABLE, name, {})
        if not table:
            continue
        if table.get("rope_theta") is not None:
            theta = read.checked(NUMBER, f"{name}.rope_theta", table["rope_theta"])
        found[name] = _scaling(read, name, table, has_mscale=family.model_type == MODEL_TYPE)
    scaling = found.get("rope_scaling", found.get("rope_parameters"))
    if len(found) > 1 and not read.problems and found["rope_scaling"] != found["rope_parameters"]:
        read.refuse("rope_parameters", read.value("rope_parameters"), "the same as rope_scaling", COPY)
    if scaling is not None and scaling.type == "yarn" and theta is not None and theta <= 1:
        read.refuse("rope_theta", theta, "more than 1 with yarn", COPY)
    return float(theta or 0.0), scaling


def _scaling(read: Keys, name: str, table: Mapping[str, Any], *, has_mscale: bool) -> RopeScaling | None:
    """What a table says of scaling; None for nothing, and where it is wrong, which is noted."""
    types = [table[key] for key in ("rope_type", "type") if table.get(key) is not None]  # the newer name, the older
    kind = types[0] if types else "default"
    if kind not in ("default", *ROPE_SCALING_KEYS):
        read.refuse(f"{name}.rope_type", kind, f"one of default, {', '.join(ROPE_SCALING_KEYS)}", CANNOT)
        return None
    needed, optional = ROPE_SCALING_KEYS.get(kind, ((), ()))
    if not has_mscale:
        optional = tuple(key for key in optional if key not in _MAGNITUDES)
    unknown = table.keys() - {*needed, *optional, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for key in sorted(unknown):
        if table[key] is not None:
            read.refuse(f"{name}.{key}", table[key], f"null: rope_type {kind} is built without it", CANNOT)
    _require_whole_rotation(read, f"{name}.partial_rotary_factor", table.get("partial_rotary_factor", 1.0))
    values = {key: table.get(key) for key in (*needed, *optional) if key in needed or table.get(key) is not None}
    if values.get("original_max_position_embeddings", 0) is None:
        values["original_max_position_embeddings"] = read.value("max_position_embeddings")  # as transformers 5 has it
    checked = {key: read.checked(KINDS.get(key, NUMBER), f"{name}.{key}", value) for key, value in values.items()}
    if kind == "default" or None in checked.values():
        return None
    scaling = RopeScaling(kind, **checked)
    given = [key for key in _MAGNITUDES if checked.get(key) is not None]
    if len(given) == 1:
        read.refuse(f"{name}.{given[0]}", checked[given[0]], f"{' and '.join(_MAGNITUDES)} together", CANNOT)
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        least, most = getattr(scaling, low), getattr(scaling, high)
        if least is not None and most is not None and least >= most:
            read.refuse(f"{name}.{high}", most, f"more than {low} ({least})", COPY)
    return scaling
