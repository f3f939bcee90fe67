"""`[model]`: the shape of Phalanx's own decoder (a preset, overridden key by key), or a class of the user's with
arguments of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import GetPydanticSchema, ValidatorFunctionWrapHandler, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from phalanx.spec.experts import MoeArgs
from phalanx.spec.keys import MOST, Mark, Section, key, wrong
from phalanx.spec.latent import MlaArgs
from phalanx.spec.own import OWN_PATTERN, require_json
from phalanx.spec.presets import PRESETS

# By type of scaling: the keys that it needs, and those that it may have.
ROPE_SCALING_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}


class RopeScaling(Section):
    """Rotary frequencies slowed down, for windows longer than the ones a model was first trained on. Leave the table
    out where there were none."""

    type: Literal["linear", "llama3", "yarn"] = key(
        Mark.IDENTITY,
        "What slows down: every frequency (linear), the low ones (llama3, as Llama 3.1 has it), or by arXiv 2309.00071 "
        "(yarn).",
    )
    factor: float = key(Mark.IDENTITY, "How many times longer the windows are.", ge=1, le=1e9)
    original_max_position_embeddings: int | None = key(
        Mark.IDENTITY, "Longest window of the first training (llama3, yarn).", None, unit="tokens", gt=0
    )
    low_freq_factor: float | None = key(
        Mark.IDENTITY, "Turns in the original window below which a pair slows down by `factor` (llama3).", None, gt=0
    )
    high_freq_factor: float | None = key(
        Mark.IDENTITY, "Turns in the original window from which a pair keeps its frequency (llama3).", None, gt=0
    )
    beta_fast: float | None = key(
        Mark.IDENTITY, "Turns from which a pair keeps its frequency (yarn).", None, shown="32 with yarn", gt=0
    )
    beta_slow: float | None = key(
        Mark.IDENTITY, "Turns below which a pair slows down by `factor` (yarn).", None, shown="1 with yarn", gt=0
    )
    attention_factor: float | None = key(
        Mark.IDENTITY,
        "What queries and keys are multiplied by (yarn).",
        None,
        shown="0.1 ln(factor) + 1 with yarn, of mscale by that of mscale_all_dim where they are given",
        gt=0,
    )
    mscale: float | None = key(
        Mark.IDENTITY,
        "What ln(factor) is multiplied by in what rotated parts are multiplied by (yarn with mla), as in DeepSeek-V3.",
        None,
        gt=0,
    )
    mscale_all_dim: float | None = key(
        Mark.IDENTITY,
        "The same for whole scores, rotated or not (yarn with mla): the softmax is of (0.1 mscale_all_dim ln(factor) + "
        "1)^2 times as much.",
        None,
        gt=0,
    )

    @property
    def usual(self) -> frozenset[str]:
        """Keys of a later version than the first that say nothing."""
        return frozenset(name for name in ("mscale", "mscale_all_dim") if getattr(self, name) is None)


class ModelArgs(Section):
    """Shape of the decoder. Keys override those of the preset; without a preset those without a default must be
    given."""

    dim: int = key(Mark.IDENTITY, "Width of the residual stream.", unit="elements", gt=0, shapes=True)
    n_layers: int = key(Mark.IDENTITY, "Transformer blocks.", unit="layers", gt=0, shapes=True)
    n_heads: int = key(Mark.IDENTITY, "Query heads of each layer.", unit="heads", gt=0, shapes=True)
    n_kv_heads: int = key(
        Mark.IDENTITY,
        "Key and value heads of each layer (fewer: grouped queries). parallel.tp divides them, or is a multiple: then "
        "each rank holds the one head that its queries need.",
        0,
        unit="heads",
        shown="n_heads",
        gt=0,
        shapes=True,
    )
    head_dim: int = key(
        Mark.IDENTITY,
        "Width of one head.",
        0,
        unit="elements",
        shown="dim / n_heads, or what model.args.mla says",
        gt=0,
        shapes=True,
    )
    ffn_dim: int = key(
        Mark.IDENTITY,
        "Inner width of the SwiGLU; in a mixture of experts of its dense layers, left out where there are none.",
        0,
        unit="elements",
        ge=0,
        shapes=True,
    )
    vocab_size: int = key(
        Mark.IDENTITY, "Rows of the embedding; at least the tokenizer's size.", unit="tokens", gt=0, shapes=True
    )
    norm_eps: float = key(Mark.IDENTITY, "Added to the mean square inside RMSNorm.", 1e-5, gt=0)
    rope_theta: float = key(Mark.IDENTITY, "Base of the rotary position frequencies.", 10_000.0, gt=0)
    tie_embeddings: bool = key(Mark.IDENTITY, "Whether the output head is the token embedding.", False, shapes=True)
    qk_norm: bool = key(
        Mark.IDENTITY,
        "Whether each head of queries and keys is normalised before it is rotated, as in Qwen3.",
        False,
        shapes=True,
    )
    qkv_bias: bool = key(
        Mark.IDENTITY, "Whether queries, keys and values have biases, as in Qwen2.", False, shapes=True
    )
    dropout: float = key(Mark.IDENTITY, "Chance that a residual branch's element is dropped.", 0.0, ge=0, lt=1)
    moe: MoeArgs | None = None
    mla: MlaArgs | None = None
    rope_scaling: RopeScaling | None = None

    @model_validator(mode="before")
    @classmethod
    def _heads_default(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "n_heads" not in value:
            return value
        dim, heads = value.get("dim"), value["n_heads"]
        filled = {"n_kv_heads": heads, **value}
        if (mla := value.get("mla")) is not None:
            named = ("qk_nope_head_dim", "qk_rope_head_dim")
            parts = [mla[name] for name in named if type(mla.get(name)) is int] if isinstance(mla, dict) else []
            if len(parts) == 2 and min(parts) > 0:
                filled.setdefault("head_dim", sum(parts))
        elif type(dim) is int and type(heads) is int and 0 < heads <= dim <= MOST["elements"] and dim % heads == 0:
            filled.setdefault("head_dim", dim // heads)
        return filled

    @property
    def usual(self) -> frozenset[str]:
        """Keys of a later version than the first that have the value which was the only one before."""
        width = self.mla.head_dim if self.mla else self.dim // self.n_heads
        usual = {"head_dim": width, "qk_norm": False, "qkv_bias": False}
        return frozenset(name for name, value in usual.items() if getattr(self, name) == value)


class Model(Section):
    """What is trained."""

    preset: str | None = key(Mark.FREE, f"Named shape that `[model.args]` starts from: {', '.join(PRESETS)}.", None)
    class_: str | None = key(
        Mark.IDENTITY,
        "Your own model as `package.module:Class`; `[model.args]` are then its keyword arguments.",
        None,
        alias="class",
        pattern=OWN_PATTERN,
        shapes=True,
    )
    attn_backend: Literal["sdpa", "flex", "varlen"] = key(
        Mark.FREE,
        "What computes attention, with the same numbers up to rounding: `sdpa` needs a dense mask where documents are "
        "kept apart, `flex` skips its empty blocks (GPUs only), `varlen` takes each document "
        "as a sequence of its own.",
        "sdpa",
    )
    args: Annotated[ModelArgs | dict[str, Any], GetPydanticSchema(lambda _source, handler: handler(ModelArgs))]

    @model_validator(mode="before")
    @classmethod
    def _merge_preset(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        preset = value.get("preset")
        base = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        args = value.get("args", {})
        return {**value, "args": _merge(base, args) if isinstance(args, dict) else args}

    @field_validator("preset")
    @classmethod
    def _preset_exists(cls, value: str | None) -> str | None:
        if value is not None and value not in PRESETS:
            raise wrong(f"one of {', '.join(PRESETS)}", "choose one, or leave it out and fill in [model.args]")
        return value

    @field_validator("args", mode="wrap")
    @classmethod
    def _own_arguments(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        """The arguments of a user's class are not ours to check, as long as they can be written down as JSON."""
        if not info.data.get("class_") or not isinstance(value, dict):
            return handler(value)
        require_json(value)
        return value

    @property
    def decoder(self) -> ModelArgs:
        """The arguments when the model is Phalanx's own decoder (no `class`)."""
        assert isinstance(self.args, ModelArgs)
        return self.args


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {name: _merge(value, {}) if isinstance(value, Mapping) else value for name, value in base.items()}
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged
