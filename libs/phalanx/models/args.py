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

    def __post_init__(self) -> None:
        if self.type == "yarn":
            yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.1 * math.log(self.factor) + 1.0}
            for name, usual in yarn.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, usual)


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Experts in the place of every layer's feed-forward; the names are those of `[model.args.moe]`."""

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


@dataclass(frozen=True, slots=True)
class DecoderArgs:
    """Shape of a decoder; the names are those of `[model.args]`. head_dim 0: dim / n_heads. ffn_dim 0: with moe."""

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

    def __post_init__(self) -> None:
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
        return cls(**said)

    def by_key(self) -> dict[str, Any]:
        """Values by their dotted keys below `[model.args]`; those of a table that is left out have none."""
        values = asdict(self)
        tables = {table: values.pop(table) or {} for table in ("rope_scaling", "moe")}
        return {**values, **{f"{table}.{name}": value for table, own in tables.items() for name, value in own.items()}}
