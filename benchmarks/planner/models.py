"""From the model of a published measurement to the planner's shape of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.planner import ModelShape, count_parameters
from phalanx.planner.shape import LatentAttention

# Shapes that a row may leave out where its model is public: fields of the row's schema.
_PUBLIC: Mapping[str, Mapping[str, Any]] = {
    "moonlight-16b-a3b": {
        "layers": 27,
        "hidden": 2048,
        "heads": 16,
        "ffn": 11_264,
        "vocab": 163_840,
        "experts": 64,
        "topk": 6,
        "moe_ffn": 1408,
        "shared_experts": 2,
        "dense_layers": 1,
        "kv_lora_rank": 512,
        "activation": "swiglu",
    },
}


def model_shape(given: Mapping[str, Any], said: list[str]) -> ModelShape:
    """The shape; what is missing is taken from the parameter count, by the proportions of GPT-3's family."""
    public = _PUBLIC.get(str(given.get("name") or "").lower())
    if public and not given.get("hidden"):
        given = {**public, **given}
        said.append(f"shape not given: that of {given['name']} as published")
    hidden, layers, heads = given.get("hidden"), given.get("layers"), given.get("heads")
    if not hidden or not layers:
        hidden, layers = _guess(float(given.get("params") or 7e9), float(given.get("active_params") or 0))
        said.append(f"shape not given: {layers} layers of width {hidden}, by the number of parameters")
        # So many that the usual tensor-parallel sizes divide them.
        heads = heads or max(round(hidden / 1024), 1) * 8
    heads = int(heads or max(hidden // 128, 1))
    if not given.get("heads"):
        said.append(f"heads not given: {heads}")
    vocab = given.get("vocab")
    if not vocab:
        vocab = 51_200
        said.append("vocabulary not given: 51,200")
    experts = int(given.get("experts") or 0)
    expert_ffn = int(given.get("moe_ffn") or 0)
    if experts and not expert_ffn:
        expert_ffn = int(given.get("ffn") or 4 * hidden)
        said.append(f"width of experts not given: {expert_ffn}")
    if experts and not given.get("topk"):
        said.append("experts of a token not given: 2")
    base = ModelShape(
        dim=int(hidden),
        n_layers=int(layers),
        n_heads=heads,
        n_kv_heads=int(given.get("kv_heads") or heads),
        ffn_dim=int(given.get("ffn") or (0 if experts else 4 * hidden)),
        vocab_size=int(vocab),
        num_experts=experts,
        top_k=int(given.get("topk") or (min(2, experts))),
        expert_ffn_dim=expert_ffn,
        num_shared_experts=int(given.get("shared_experts") or 0),
        head_width=given.get("head_dim"),
        num_dense_layers=int(given.get("dense_layers") or 0),
        latent=_latent(given),
    )
    sliding = str(given.get("sliding_window") or "")
    width = re.match(r"[1-9][0-9]{0,7}\b", sliding)
    if width:
        base = replace(base, window=int(width[0]), window_every=2 if "every other" in sliding else 1)
    elif sliding:
        said.append("sliding window without its width: not counted")
    return replace(base, gated_ffn=_is_gated(base, given, said))


def _latent(given: Mapping[str, Any]) -> LatentAttention | None:
    if not given.get("kv_lora_rank"):
        return None
    return LatentAttention(
        query_rank=int(given.get("q_lora_rank") or 0),
        kv_rank=int(given["kv_lora_rank"]),
        plain_dim=int(given.get("qk_nope_head_dim") or 128),
        rotary_dim=int(given.get("qk_rope_head_dim") or 64),
        value_dim=int(given.get("v_head_dim") or 128),
    )


def _is_gated(base: ModelShape, given: Mapping[str, Any], said: list[str]) -> bool:
    activation = given.get("activation")
    if activation:
        if not re.search(r"lu|swish", activation.lower()):
            said.append(f"activation {activation[:40]!r} is not known: taken as one without a gate")
        return "glu" in activation.lower()
    if given.get("params") and given.get("ffn"):
        counts = {gated: count_parameters(replace(base, gated_ffn=gated)).total for gated in (True, False)}
        return min(counts, key=lambda gated: abs(counts[gated] - float(given["params"])))
    if base.num_experts:
        return True
    return base.ffn_dim != 4 * base.dim


def _guess(params: float, active: float) -> tuple[int, int]:
    """Width and layers of a dense model of that many (active) parameters, 128 times as wide as deep at most 100."""
    dense = active or params
    layers = max(round((dense / 12 / 128**2) ** (1 / 3)), 4)
    layers = min(layers, 100)
    width = max(round((dense / 12 / layers) ** 0.5 / 128), 1) * 128
    return width, layers
