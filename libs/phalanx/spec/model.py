"""`[model]`: the shape of Phalanx's own decoder (a preset, overridden key by key), or a class of the user's with
arguments of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import GetPydanticSchema, ValidatorFunctionWrapHandler, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from phalanx.spec.keys import Mark, Section, key
from phalanx.spec.own import OWN_PATTERN, require_json, wrong
from phalanx.spec.presets import PRESETS


class MoeArgs(Section):
    """Mixture of experts: every layer's feed-forward becomes `num_experts` routed SwiGLU experts. Leave the table out
    for a dense model."""

    num_experts: int = key(Mark.IDENTITY, "Routed experts in every layer.", unit="experts", gt=0, shapes=True)
    top_k: int = key(Mark.IDENTITY, "Experts that each token is sent to.", unit="experts", gt=0)
    expert_ffn_dim: int = key(Mark.IDENTITY, "Inner width of one expert.", unit="elements", gt=0, shapes=True)
    num_shared_experts: int = key(
        Mark.IDENTITY, "Experts of the same width that every token passes.", 0, unit="experts", ge=0, shapes=True
    )


class ModelArgs(Section):
    """Shape of the decoder. Keys override those of the preset; without a preset those without a default must be
    given."""

    dim: int = key(Mark.IDENTITY, "Width of the residual stream.", unit="elements", gt=0, shapes=True)
    n_layers: int = key(Mark.IDENTITY, "Transformer blocks.", unit="layers", gt=0, shapes=True)
    n_heads: int = key(Mark.IDENTITY, "Query heads of each layer.", unit="heads", gt=0, shapes=True)
    n_kv_heads: int = key(
        Mark.IDENTITY,
        "Key and value heads of each layer (fewer: grouped queries).",
        0,
        unit="heads",
        shown="n_heads",
        gt=0,
        shapes=True,
    )
    ffn_dim: int = key(
        Mark.IDENTITY,
        "Inner width of the SwiGLU; left out in a mixture of experts.",
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
    dropout: float = key(Mark.IDENTITY, "Chance that a residual branch's element is dropped.", 0.0, ge=0, lt=1)
    moe: MoeArgs | None = None

    @model_validator(mode="before")
    @classmethod
    def _heads_default(cls, value: Any) -> Any:
        return {"n_kv_heads": value["n_heads"], **value} if isinstance(value, dict) and "n_heads" in value else value

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads


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
