"""Exact parameter counts: of the whole model by part, and of one rank by its place in the layout.

The decoder: token embedding [V, d]; in each layer two norms [d], wq [h hd, d], wk and wv [kv hd, d], wo [d, h hd], and
SwiGLU w1, w3 [f, d], w2 [d, f], or a router [E, d] with E such SwiGLUs and shared ones; a final norm [d]; an output
head [V, d] unless it is tied.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planner.shape import ModelShape
from phalanx.spec.layout import Layout


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameters by part. active_experts: those of the routed experts that one token passes."""

    embedding: int
    attention: int
    ffn: int
    router: int
    experts: int
    active_experts: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.attention + self.ffn + self.router + self.experts + self.norms + self.head

    @property
    def active(self) -> int:
        """Those that take part in one token's forward; the total for a dense model."""
        return self.total - self.experts + self.active_experts


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Parameters of one layer. ffn: the dense or shared SwiGLU; experts: all routed ones."""

    attention: int
    ffn: int
    router: int
    experts: int
    norms: int


def layer_counts(model: ModelShape) -> LayerCounts:
    """Parameters of one layer, by part."""
    heads = 2 * model.n_heads + 2 * model.n_kv_heads
    dense_width = model.num_shared_experts * model.expert_ffn_dim if model.num_experts else model.ffn_dim
    return LayerCounts(
        attention=model.dim * model.head_dim * heads,
        ffn=3 * model.dim * dense_width,
        router=model.num_experts * model.dim,
        experts=model.num_experts * expert_count(model),
        norms=2 * model.dim,
    )


def expert_count(model: ModelShape) -> int:
    """Parameters of one routed expert."""
    return 3 * model.dim * model.expert_ffn_dim


def count_parameters(model: ModelShape) -> ParameterCounts:
    """Parameters of the whole model, by part."""
    layer, layers = layer_counts(model), model.n_layers
    table = model.vocab_size * model.dim
    return ParameterCounts(
        embedding=table,
        attention=layers * layer.attention,
        ffn=layers * layer.ffn,
        router=layers * layer.router,
        experts=layers * layer.experts,
        active_experts=layers * model.top_k * expert_count(model),
        norms=layers * layer.norms + model.dim,
        head=0 if model.tie_embeddings else table,
    )


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank before they are sharded over dp_shard.

    split: its part of what tensor parallelism cuts. whole: what every tp rank holds (norms, router). experts: its part
    of the routed experts. largest_block: of its biggest layer alone, without the experts; largest_experts: of that
    layer's experts.
    """

    split: int
    whole: int
    experts: int
    block: int
    block_experts: int
    ends: int

    @property
    def dense(self) -> int:
        """All but the routed experts."""
        return self.split + self.whole

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def rank_parameters(
    model: ModelShape, layout: Layout, num_layers: int, *, is_first: bool, is_last: bool
) -> RankParameters:
    """Parameters of a rank that holds `num_layers` layers, and the embedding (is_first) or final norm and head
    (is_last).

    Over all pp, tp and ep ranks `split` and `experts` sum to their totals, `whole` once for each tp rank.
    """
    layer, tp = layer_counts(model), layout.tp
    table = model.vocab_size * model.dim
    num_tables = int(is_first) + int(is_last and not (model.tie_embeddings and is_first))
    block_split, block_whole = (layer.attention + layer.ffn) // tp, layer.norms + layer.router
    block_experts = layer.experts // (tp * layout.ep)
    final_norm = model.dim if is_last else 0
    return RankParameters(
        split=num_layers * block_split + num_tables * table // tp,
        whole=num_layers * block_whole + final_norm,
        experts=num_layers * block_experts,
        block=block_split + block_whole,
        block_experts=block_experts,
        ends=num_tables * table // tp + final_norm,
    )
