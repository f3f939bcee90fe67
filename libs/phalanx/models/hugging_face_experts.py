"""Experts in Hugging Face's Mixtral, Qwen3-MoE and DeepSeek-V3 formats and back. All store each expert's weights by
themselves, as checkpoints here do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.errors import PhalanxError
from phalanx.models.args import MoeShape
from phalanx.models.config_keys import CANNOT, COPY, FLAG, WHOLE, Keys

_OURS: Final = re.compile(r"layers\.(\d+)\.feed_forward\.(router\.\w+|(?:experts\.(\d+)|shared)\.(w[123])\.weight)")
_THEIRS: Final = re.compile(
    r"model\.layers\.(\d+)\.(\w+)\.(gate\.\w+|(?:experts\.(\d+)|shared_experts)\.(\w+)\.weight)"
)
_ROUTER: Final = {"router.weight": "gate.weight", "router.selection_bias": "gate.e_score_correction_bias"}
_ROUTER_BACK: Final = {theirs: ours for ours, theirs in _ROUTER.items()}


@dataclass(frozen=True, slots=True)
class Form:
    """How a family names experts. room: of a layer. weights: names of w1, w2, w3. width, num_experts: keys of
    config.json, of the latter the one written and those read.
    """

    room: str
    weights: Mapping[str, str]
    width: str
    num_experts: tuple[str, ...]


FORMS: Final = {
    "mixtral": Form(
        "block_sparse_moe", {"w1": "w1", "w2": "w2", "w3": "w3"}, "intermediate_size", ("num_local_experts",)
    ),
    "qwen3_moe": Form(
        "mlp",
        {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
        "moe_intermediate_size",
        ("num_experts", "num_local_experts"),  # transformers 4 and 5
    ),
    "deepseek_v3": Form(
        "mlp",
        {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
        "moe_intermediate_size",
        ("n_routed_experts",),
    ),
}


def expert_name_to(name: str, model_type: str) -> str | None:
    """The name of a router's weight or bias or of an expert's weight there, of shared ones as well; None for any other,
    and for another family.
    """
    found, form = _OURS.fullmatch(name), FORMS.get(model_type)
    if found is None or form is None:
        return None
    layer, what, expert, weight = found.groups()
    if what.startswith("router."):
        if what not in _ROUTER:
            return None
        inner = _ROUTER[what]
    else:
        room = "shared_experts" if expert is None else f"experts.{expert}"
        inner = f"{room}.{form.weights[weight]}.weight"
    return f"model.layers.{layer}.{form.room}.{inner}"


def expert_name_from(name: str) -> str | None:
    """The way back."""
    found = _THEIRS.fullmatch(name)
    if found is None:
        return None
    layer, room, what, expert, theirs = found.groups()
    for form in FORMS.values():
        ours = {there: here for here, there in form.weights.items()}
        if room != form.room or (what not in _ROUTER_BACK and theirs not in ours):
            continue
        place = "shared" if expert is None else f"experts.{expert}"
        inner = _ROUTER_BACK.get(what) or f"{place}.{ours[theirs]}.weight"
        return f"layers.{layer}.feed_forward.{inner}"
    return None


def require_form(moe: MoeShape, *, qk_norm: bool, qkv_bias: bool) -> str:
    """The model type of a decoder with these experts. Raises PhalanxError where none of transformers' has them."""
    kept = {"num_shared_experts": 0, "score": "softmax", "route_scale": 1.0, "num_groups": 1, "selection_bias": False}
    kept["first_k_dense"] = 0
    if not qk_norm:
        kept["normalise"] = True
    for name, only in kept.items():
        if getattr(moe, name) != only:
            raise _no_form(f"moe.{name}", getattr(moe, name), str(only).lower())
    if qkv_bias:
        raise _no_form("qkv_bias", True, "false")
    return "qwen3_moe" if qk_norm else "mixtral"


def _no_form(name: str, value: object, only: str) -> PhalanxError:
    return PhalanxError(
        f"[model.args] {name}",
        value=value,
        expected=f"{only}, as Mixtral and Qwen3-MoE of transformers have it",
        remedy="convert it with phalanx.snapshot.load",
    )


def moe_keys(moe: MoeShape, model_type: str) -> dict[str, Any]:
    """What config.json says of experts."""
    form = FORMS[model_type]
    keys: dict[str, Any] = {
        "intermediate_size": moe.expert_ffn_dim,
        form.width: moe.expert_ffn_dim,
        **dict.fromkeys(form.num_experts, moe.num_experts),
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss,
        "output_router_logits": False,
    }
    if model_type == "qwen3_moe":
        keys |= {"norm_topk_prob": moe.normalise, "mlp_only_layers": []}
    return keys


def moe_from(read: Keys, model_type: str) -> MoeShape | None:
    """The experts that config.json tells of; None, and problems noted, where it is wrong. How a model was balanced is
    not read: the loss there is another one.
    """
    form = FORMS[model_type]
    named = [key for key in form.num_experts if read.value(key) is not None] or [form.num_experts[0]]
    num_experts = read.of(WHOLE, named[0])
    top_k = read.of(WHOLE, "num_experts_per_tok", 2 if model_type == "mixtral" else 8)
    width = read.of(WHOLE, form.width)
    normalise = read.of(FLAG, "norm_topk_prob", False) if model_type == "qwen3_moe" else True
    if read.value("mlp_only_layers", []) != []:
        read.refuse("mlp_only_layers", read.value("mlp_only_layers"), "[]: every layer has experts here", CANNOT)
    if num_experts is not None and top_k is not None and top_k > num_experts:
        read.refuse("num_experts_per_tok", top_k, f"at most {named[0]} ({num_experts})", COPY)
    if None in (num_experts, top_k, width, normalise):
        return None
    return MoeShape(num_experts, top_k, width, normalise=normalise)
