"""DeepSeek-V3 in Hugging Face's format and back: names of latent attention's weights, and what config.json says of
latents and experts. Modules that predict further tokens (`num_nextn_predict_layers`) are no part of the decoder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs, MlaShape, MoeShape
from phalanx.models.config_keys import CANNOT, COPY, COUNT, FLAG, NUMBER, WHOLE, Keys

MODEL_TYPE: Final = "deepseek_v3"
LATENT_NAMES: Final = {
    "attention.wq_a.weight": "self_attn.q_a_proj.weight",
    "attention.q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.wq_b.weight": "self_attn.q_b_proj.weight",
    "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
}
# What config.json must say, which is what transformers takes where it says nothing.
ONLY: Final = {
    "attention_bias": False,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
WHY: Final = {
    "rope_interleave": "neighbours pair in rotated parts of latent attention",
    "scoring_func": "DeepSeek-V3 scores each expert by itself",
    "topk_method": "experts are chosen by groups with a bias",
    "moe_layer_freq": "every layer after the first ones has experts here",
}
# Key there, kind, and what transformers takes where it is left out.
_MLA: Final = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_MOE: Final = {
    "num_experts": ("n_routed_experts", WHOLE, 256),
    "top_k": ("num_experts_per_tok", WHOLE, 8),
    "expert_ffn_dim": ("moe_intermediate_size", WHOLE, 2048),
    "num_shared_experts": ("n_shared_experts", WHOLE, 1),
    "normalise": ("norm_topk_prob", FLAG, True),
    "route_scale": ("routed_scaling_factor", NUMBER, 2.5),
    "num_groups": ("n_group", WHOLE, 8),
    "top_groups": ("topk_group", WHOLE, 4),
    "first_k_dense": ("first_k_dense_replace", COUNT, 3),
}
_QUERY_RANK: Final = 1536
_LAYER: Final = re.compile(r"(?:model\.)?layers\.(\d+)\..+")


def deepseek_keys(args: DecoderArgs) -> dict[str, Any]:
    """What config.json says beside the keys of every family. Raises PhalanxError for a shape that DeepSeek-V3 of
    transformers does not have.
    """
    mla, moe = args.mla, args.moe
    assert mla is not None
    if moe is None:
        raise _no_form("moe", None, "a table")
    for name, only in {"score": "sigmoid", "selection_bias": True}.items():
        if getattr(moe, name) != only:
            raise _no_form(f"moe.{name}", getattr(moe, name), str(only).lower())
    if not moe.num_shared_experts:
        raise _no_form("moe.num_shared_experts", 0, "at least 1")
    if moe.num_experts // moe.num_groups < 2:
        raise _no_form("moe.num_groups", moe.num_groups, "groups of at least two experts")
    return {
        # Where nothing is dense the width is of no layer.
        "intermediate_size": args.ffn_dim or moe.expert_ffn_dim,
        "head_dim": mla.qk_rope_head_dim,  # what rotary positions turn, there
        "q_lora_rank": mla.q_lora_rank or None,
        **{key: getattr(mla, key) for key in _MLA},
        **{theirs: getattr(moe, ours) for ours, (theirs, _, _) in _MOE.items()},
        "num_nextn_predict_layers": 0,
    }


def deepseek_shape(read: Keys) -> dict[str, Any]:
    """`mla`, `moe` and ffn_dim as config.json has them; problems noted where it is wrong. How a model was balanced is
    not read.
    """
    rank = read.of(WHOLE, "q_lora_rank", _QUERY_RANK) if read.config.get("q_lora_rank", _QUERY_RANK) is not None else 0
    sizes = {key: read.of(WHOLE, key, usual) for key, usual in _MLA.items()}
    choice = {ours: read.of(kind, theirs, usual) for ours, (theirs, kind, usual) in _MOE.items()}
    layers, width = read.of(WHOLE, "num_hidden_layers"), read.of(WHOLE, "intermediate_size", 18_432)
    if None in (rank, layers, width, *sizes.values(), *choice.values()):
        return {}
    if sizes["qk_rope_head_dim"] % 2:
        read.refuse("qk_rope_head_dim", sizes["qk_rope_head_dim"], "an even width: rotary positions turn pairs", CANNOT)
    _require_choice(read, choice, layers)
    moe = MoeShape(score="sigmoid", selection_bias=True, **{**choice, "route_scale": float(choice["route_scale"])})
    return {"mla": MlaShape(q_lora_rank=rank, **sizes), "moe": moe, "ffn_dim": width if moe.first_k_dense else 0}


def _require_choice(read: Keys, choice: dict[str, Any], layers: int) -> None:
    experts, groups = choice["num_experts"], choice["num_groups"]
    if choice["first_k_dense"] >= layers:
        read.refuse("first_k_dense_replace", choice["first_k_dense"], f"less than num_hidden_layers ({layers})", CANNOT)
    if experts % groups or experts // groups < 2:
        read.refuse("n_group", groups, f"groups of the {experts} experts, of two at least", COPY)
    elif choice["top_groups"] > groups:
        read.refuse("topk_group", choice["top_groups"], f"at most n_group ({groups})", COPY)
    elif choice["top_k"] > (held := choice["top_groups"] * (experts // groups)):
        read.refuse("num_experts_per_tok", choice["top_k"], f"at most the {held} experts of topk_group groups", COPY)


def _no_form(name: str, value: object, only: str) -> PhalanxError:
    return PhalanxError(
        f"[model.args] {name}",
        value=value,
        expected=f"{only}, as DeepSeek-V3 of transformers has it",
        remedy="convert it with phalanx.snapshot.load",
    )


def num_predicting(config: Mapping[str, Any] | None) -> int:
    """Layers behind the decoder's that predict further tokens, by a config.json; 0 where it tells of none."""
    if config is None or config.get("model_type") != MODEL_TYPE:
        return 0
    # transformers names it either way.
    found = config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0))
    return found if type(found) is int and found > 0 else 0


def is_predicting(name: str, n_layers: int, num: int) -> bool:
    """Whether a tensor of that name belongs to one of `num` layers behind the decoder's `n_layers`."""
    found = _LAYER.fullmatch(name)
    return found is not None and n_layers <= int(found[1]) < n_layers + num
