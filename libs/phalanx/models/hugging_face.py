"""The built-in decoder in Hugging Face's Llama format and back: parameter names and `config.json`.

Both sides rotate the two halves of a head against each other, so that weights carry over as they are: no permutation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.errors import PhalanxError, Problems
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
# What a key must say for the decoder to compute the model; what transformers takes where it says nothing.
_ONLY = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_COPY = "copy the config.json that belongs to the weights"
_CANNOT = "the decoder can't load this model"


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


def config_from_hugging_face(config: object, where: str = "config.json") -> DecoderArgs:
    """The decoder's shape from the content of a Llama `config.json`, which `where` names in errors.

    Raises Problems that list every key with a value that is none, and all that the decoder can't compute.
    """
    read = _Keys(where, config)
    for key, only in _ONLY.items():
        read.require(key, read.value(key, None if key == "model_type" else only), only)
    heads = read.of(_WHOLE, "num_attention_heads")
    fallback = {"num_key_value_heads": heads or 1, "tie_word_embeddings": False}
    kinds = {"rms_norm_eps": _NUMBER, "tie_word_embeddings": _FLAG}
    shape = {
        ours: read.of(kinds.get(theirs, _WHOLE), theirs, fallback.get(theirs))
        for ours, theirs in _CONFIG.items()
        if theirs != "num_attention_heads"
    }
    rope_theta = _rope_theta(read)
    _require_heads_that_fit(read, shape["dim"], heads, shape["n_kv_heads"])
    if read.problems:
        raise Problems(where, read.problems)
    shape |= {"n_heads": heads, "norm_eps": float(shape["norm_eps"]), "rope_theta": rope_theta}
    return DecoderArgs(**shape)


def _rope_theta(read: _Keys) -> float:
    """The base of the rotary angles. A table's goes before the top level's, as transformers has it."""
    found = read.of(_NUMBER, "rope_theta", 10000.0)
    for table in ("rope_scaling", "rope_parameters"):
        rope = read.of(_TABLE, table, {})
        if not isinstance(rope, dict):
            continue
        for key in ("type", "rope_type"):  # the older name and the newer
            said = rope.get(key)
            read.require(f"{table}.{key}", "default" if said is None else said, "default")
        if rope.get("rope_theta") is not None:
            found = read.checked(_NUMBER, f"{table}.rope_theta", rope["rope_theta"])
    return 0.0 if found is None else float(found)


def _require_heads_that_fit(read: _Keys, dim: int | None, heads: int | None, kv_heads: int | None) -> None:
    """Notes widths and numbers of heads that do not fit each other; None: one that is wrong by itself."""
    head_dim = read.of(_WHOLE, "head_dim", dim // heads if dim and heads else 1)
    if dim is None or heads is None:
        return
    if dim % (2 * heads):
        read.refuse("hidden_size", dim, f"a multiple of 2 x num_attention_heads ({2 * heads})", _CANNOT)
    elif head_dim is not None:
        read.require("head_dim", head_dim, dim // heads)
    if kv_heads is not None and heads % kv_heads:
        read.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})", _CANNOT)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a key's value must be, in words, and whether one is."""

    expected: str
    accepts: Callable[[Any], bool]


# bool is an int of Python's; JSON as Python reads it has NaN and infinity.
_WHOLE: Final = _Kind("a whole number above 0", lambda value: type(value) is int and 0 < value < 1 << 31)
_NUMBER: Final = _Kind(
    "a number above 0", lambda value: type(value) in (int, float) and 0 < value <= sys.float_info.max
)
_FLAG: Final = _Kind("true or false", lambda value: type(value) is bool)
_TABLE: Final = _Kind("a table of keys", lambda value: isinstance(value, dict))


class _Keys:
    """Reads the keys of a config.json, and notes what is wrong with each."""

    def __init__(self, where: str, config: object) -> None:
        if not isinstance(config, Mapping):
            raise PhalanxError(where, value=type(config).__name__, expected="a JSON object", remedy=_COPY)
        self._where, self._config = where, config
        self.problems: list[PhalanxError] = []

    def value(self, key: str, default: object = None) -> object:
        """What stands at `key`; `default` where nothing or null does."""
        found = self._config.get(key)
        return default if found is None else found

    def of(self, kind: _Kind, key: str, default: object = None) -> Any:
        """The value at `key`, which is of that kind; None, and a problem noted, where it is not."""
        return self.checked(kind, key, self.value(key, default))

    def checked(self, kind: _Kind, key: str, value: object) -> Any:
        """`value`, which is of that kind; None, and a problem noted, where it is not."""
        if kind.accepts(value):
            return value
        self.refuse(key, value, kind.expected, _COPY)
        return None

    def require(self, key: str, value: object, only: object) -> None:
        """Notes a value other than the only one that the decoder computes."""
        if type(value) is not type(only) or value != only:
            self.refuse(key, value, f"{only!r}", _CANNOT)

    def refuse(self, key: str, value: object, expected: str, remedy: str) -> None:
        """Notes a problem."""
        self.problems.append(PhalanxError(f"{self._where} {key}", value=value, expected=expected, remedy=remedy))
