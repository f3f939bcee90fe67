"""The shape of the built-in decoder, as a value that needs no torch: what job files, planner and exports speak of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from phalanx.core.errors import PhalanxError
from phalanx.spec import ModelArgs


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary frequencies slowed down for longer windows; the names are those of `[model.args.rope_scaling]`.

    A key that is not of its type is None; those of yarn that may be left out get what the paper has.
    """

    type: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        if self.type == "yarn":
            factor = self.magnitude(self.mscale or 1.0)
            if self.mscale is not None and self.mscale_all_dim is not None:
                factor /= self.magnitude(self.mscale_all_dim)
            yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": factor}
            for name, usual in yarn.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, usual)

    def magnitude(self, mscale: float) -> float:
        """What YaRN has scores of a longer window grow by, its root: 0.1 mscale ln(factor) + 1 (arXiv 2309.00071,
        section 3.4; mscale as DeepSeek-V2 adds it, arXiv 2405.04434, section 3.1.4).
        """
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Experts in the place of every layer's feed-forward but the first ones'; names as in `[model.args.moe]`."""

    num_experts: int
    top_k: int
    expert_ffn_dim: int
    num_shared_experts: int = 0
    score: str = "softmax"
    normalise: bool = True
    route_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    aux_loss: float = 0.0
    selection_bias: bool = False
    bias_update_rate: float = 0.001
    first_k_dense: int = 0


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Keys and values from latents; the names are those of `[model.args.mla]`. q_lora_rank 0: queries straight from the
    input.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0


@dataclass(frozen=True, slots=True)
class DecoderArgs:
    """Shape of a decoder; the names are those of `[model.args]`. head_dim 0: dim / n_heads, or what mla
    says. ffn_dim 0: with moe in every layer.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_embeddings: bool = False
    head_dim: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False
    rope_scaling: RopeScaling | None = None
    moe: MoeShape | None = None
    mla: MlaShape | None = None

    def __post_init__(self) -> None:
        if self.mla is not None:
            _require_latent_heads(self)
            object.__setattr__(self, "head_dim", self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim)
            return
        if not self.head_dim and self.dim % self.n_heads == 0:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        if not self.head_dim or self.head_dim % 2:
            raise PhalanxError(
                "[model.args] dim",
                value=self.dim,
                expected=f"a multiple of 2 x n_heads ({2 * self.n_heads}), or an even head_dim beside it",
                remedy="change dim, n_heads or head_dim",
            )
        if self.n_heads % self.n_kv_heads:
            raise PhalanxError(
                "[model.args] n_kv_heads",
                value=self.n_kv_heads,
                expected=f"a divisor of n_heads ({self.n_heads})",
                remedy="change n_kv_heads",
            )

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that positions turn."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by: 1 / sqrt(head_dim), with latents and `mscale_all_dim` times the square of
        YaRN's magnitude.
        """
        scaling = self.rope_scaling
        is_scaled = self.mla is not None and scaling is not None and scaling.mscale_all_dim is not None
        magnitude = scaling.magnitude(scaling.mscale_all_dim) if is_scaled else 1.0  # type: ignore[union-attr, arg-type]
        return magnitude * magnitude / math.sqrt(self.head_dim)

    def is_dense(self, layer: int) -> bool:
        """Whether the feed-forward of a layer, counted from 0, is no experts."""
        return self.moe is None or layer < self.moe.first_k_dense

    @classmethod
    def of(cls, args: ModelArgs) -> Self:
        """From the resolved `[model.args]` of a job."""
        return cls.of_plain(args.model_dump())

    @classmethod
    def of_plain(cls, args: Mapping[str, Any]) -> Self:
        """From `[model.args]` as a job's record has it, which says nothing of keys that have come since."""
        said = {name: args[name] for name in cls.__dataclass_fields__ if args.get(name) is not None}
        if "rope_scaling" in said:
            said["rope_scaling"] = RopeScaling(**said["rope_scaling"])
        if "moe" in said:
            said["moe"] = MoeShape(**said["moe"])
        if "mla" in said:
            said["mla"] = MlaShape(**said["mla"])
        return cls(**said)

    def by_key(self) -> dict[str, Any]:
        """Values by their dotted keys below `[model.args]`; those of a table that is left out have none."""
        values = asdict(self)
        tables = {table: values.pop(table) or {} for table in ("rope_scaling", "moe", "mla")}
        return {**values, **{f"{table}.{name}": value for table, own in tables.items() for name, value in own.items()}}


def _require_latent_heads(args: DecoderArgs) -> None:
    assert args.mla is not None
    width = args.mla.qk_nope_head_dim + args.mla.qk_rope_head_dim
    wrong = {
        "mla.qk_rope_head_dim": (
            args.mla.qk_rope_head_dim,
            "even: positions turn pairs",
            args.mla.qk_rope_head_dim % 2,
        ),
        "head_dim": (args.head_dim, f"qk_nope_head_dim + qk_rope_head_dim = {width}", args.head_dim not in (0, width)),
        "n_kv_heads": (args.n_kv_heads, f"n_heads ({args.n_heads}) with mla", args.n_kv_heads != args.n_heads),
        "qk_norm": (args.qk_norm, "false with mla", args.qk_norm),
        "qkv_bias": (args.qkv_bias, "false with mla", args.qkv_bias),
    }
    for name, (value, expected, is_wrong) in wrong.items():
        if is_wrong:
            raise PhalanxError(f"[model.args] {name}", value=value, expected=expected, remedy="change it")
