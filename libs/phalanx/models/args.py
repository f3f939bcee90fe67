"""The shape of the built-in decoder, as a value that needs no torch: what job files, planner and exports speak of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from phalanx.core.errors import PhalanxError
from phalanx.spec import ModelArgs


@dataclass(frozen=True, slots=True)
class DecoderArgs:
    """Shape of a decoder; the names are those of `[model.args]`."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            raise PhalanxError(
                "[model.args] dim",
                value=self.dim,
                expected=f"a multiple of 2 x n_heads ({2 * self.n_heads})",
                remedy="change dim or n_heads",
            )
        if self.n_heads % self.n_kv_heads:
            raise PhalanxError(
                "[model.args] n_kv_heads",
                value=self.n_kv_heads,
                expected=f"a divisor of n_heads ({self.n_heads})",
                remedy="change n_kv_heads",
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    @classmethod
    def of(cls, args: ModelArgs) -> Self:
        """From the resolved `[model.args]` of a job."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})
