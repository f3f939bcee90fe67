"""Names that others give to what a checkpoint of the built-in decoder holds, and its shapes. Pure, no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs, MlaShape, MoeShape
from phalanx.models.hugging_face import name_from_hugging_face

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
STATE: Final = (*MOMENTS, "step")  # of an optimizer, for each parameter
BEGIN_ANEW: Final = "import it with --without-optimizer: AdamW then begins anew"
_STATE: Final = re.compile(r"(?:optimizer|optim)\.state\.(.+)\.(\w+)")
_SETTINGS: Final = re.compile(r"(optimizer|optim)\.param_groups\..+|(lr_scheduler|dataloader|train_state)(\..+)?")
_TABLES: Final = re.compile(r"(.+\.)?(rotary_emb\.inv_freq|freqs_cis|rope\.cache)")
_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
HEADS: Final = re.compile(r"layers\.\d+\.attention\.((wq|wk)\.(weight|bias)|(q_norm|k_norm)\.weight)")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a tensor of a source is. parameter: its canonical name. part: `model`, a moment, or `step` (the number of
    updates). hugging_face: whether the name is one of Hugging Face's.
    """

    parameter: str
    part: str
    hugging_face: bool


def shapes_of(args: DecoderArgs) -> dict[str, tuple[int, ...]]:
    """The parameters of a decoder and their shapes, tied ones once (docs/formats/checkpoint.md)."""
    dim = args.dim
    block = {**_attention(args), "attention_norm.weight": (dim,), "ffn_norm.weight": (dim,)}
    dense = _swiglu("feed_forward", dim, args.ffn_dim)
    experts = {} if args.moe is None else _mixture(args.moe, dim)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (args.vocab_size, dim)}
    for layer in range(args.n_layers):
        inside = {**block, **(dense if args.is_dense(layer) else experts)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in inside.items()}
    shapes["norm.weight"] = (dim,)
    if not args.tie_embeddings:
        shapes["output.weight"] = (args.vocab_size, dim)
    return shapes


def _attention(args: DecoderArgs) -> dict[str, tuple[int, ...]]:
    dim, queries, keys = args.dim, args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    if args.mla is not None:
        return {f"attention.{name}.weight": shape for name, shape in _latents(args.mla, dim, args.n_heads).items()}
    found: dict[str, tuple[int, ...]] = {
        "attention.wq.weight": (queries, dim),
        "attention.wk.weight": (keys, dim),
        "attention.wv.weight": (keys, dim),
        "attention.wo.weight": (dim, queries),
    }
    if args.qkv_bias:
        found |= {"attention.wq.bias": (queries,), "attention.wk.bias": (keys,), "attention.wv.bias": (keys,)}
    if args.qk_norm:
        found |= {f"attention.{each}_norm.weight": (args.head_dim,) for each in ("q", "k")}
    return found


def _latents(mla: MlaShape, dim: int, n_heads: int) -> dict[str, tuple[int, ...]]:
    queries, rank = n_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), mla.q_lora_rank
    found: dict[str, tuple[int, ...]] = (
        {"wq_a": (rank, dim), "q_a_norm": (rank,), "wq_b": (queries, rank)} if rank else {"wq": (queries, dim)}
    )
    return {
        **found,
        "wkv_a": (mla.kv_lora_rank + mla.qk_rope_head_dim, dim),
        "kv_a_norm": (mla.kv_lora_rank,),
        "wkv_b": (n_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "wo": (dim, n_heads * mla.v_head_dim),
    }


def _swiglu(name: str, dim: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.w1.weight": (width, dim), f"{name}.w2.weight": (dim, width), f"{name}.w3.weight": (width, dim)}


def _mixture(moe: MoeShape, dim: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"feed_forward.router.weight": (moe.num_experts, dim)}
    if moe.selection_bias:
        shapes["feed_forward.router.selection_bias"] = (moe.num_experts,)
    for expert in range(moe.num_experts):
        shapes |= _swiglu(f"feed_forward.experts.{expert}", dim, moe.expert_ffn_dim)
    if moe.num_shared_experts:
        shapes |= _swiglu("feed_forward.shared", dim, moe.num_shared_experts * moe.expert_ffn_dim)
    return shapes


def meaning_of(name: str, known: frozenset[str]) -> Meaning | None:
    """What a source's tensor is, by the names of torchtitan, of Hugging Face or of Phalanx; None for another's.

    known: the canonical parameter names, and that of an output head.
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    state = _STATE.fullmatch(name)
    inner, part = (state[1], state[2]) if state is not None else (name, "model")
    found = _parameter(inner, known)
    if found is None or part not in ("model", *STATE):
        return None
    return Meaning(found[0], part, found[1])


def is_setting(name: str) -> bool:
    """Whether a source's entry holds settings or counters of another trainer, which a job file says here."""
    return _SETTINGS.fullmatch(name) is not None or _TABLES.fullmatch(name) is not None


def is_counter(name: str) -> bool:
    """Whether a source's entry counts the updates of a parameter, as a tensor of one element or as a number."""
    state = _STATE.fullmatch(name)
    return state is not None and state[2] == "step"


def is_optimizer(name: str) -> bool:
    """Whether a source's tensor is state of an optimizer."""
    return _STATE.fullmatch(name) is not None


def _parameter(name: str, known: frozenset[str]) -> tuple[str, bool] | None:
    for inner in (name, name.removeprefix("model.")):
        if inner in known:
            return inner, False
        try:
            found = name_from_hugging_face(inner)
        except PhalanxError:
            continue
        if found in known:
            return found, True
    return None
