"""`[model.args.mla]`: attention whose keys and values come from latents."""

from __future__ import annotations

from phalanx.spec.keys import Mark, Section, key


class MlaArgs(Section):
    """Multi-head latent attention, as in DeepSeek-V3: keys and values of all heads come from one narrow latent a token,
    and a part of each head, with one key for all of them, carries the positions. Leave the table out for grouped
    queries."""

    q_lora_rank: int = key(
        Mark.IDENTITY,
        "Width of the latent that queries come from; 0: they come straight from the residual stream.",
        0,
        unit="elements",
        ge=0,
        shapes=True,
    )
    kv_lora_rank: int = key(
        Mark.IDENTITY, "Width of the latent that keys and values come from.", unit="elements", gt=0, shapes=True
    )
    qk_nope_head_dim: int = key(
        Mark.IDENTITY, "Elements of each query and key without positions.", unit="elements", gt=0, shapes=True
    )
    qk_rope_head_dim: int = key(
        Mark.IDENTITY,
        "Elements of each query, and of the one key that all heads share, that positions turn; an even number.",
        unit="elements",
        gt=0,
        shapes=True,
    )
    v_head_dim: int = key(Mark.IDENTITY, "Elements of each value.", unit="elements", gt=0, shapes=True)

    @property
    def head_dim(self) -> int:
        """Elements of one query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
