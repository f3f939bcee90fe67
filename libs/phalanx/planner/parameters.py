"""Exact parameter counts: of the whole model by part, and of one rank by its place in the layout.

The decoder: token embedding [V, d]; in each layer two norms [d], wq [h hd, d], wk and wv [kv hd, d], their biases and
two norms of heads [hd] where it has them, wo [d, h hd], and SwiGLU w1, w3 [f, d], w2 [d, f] (without the gate w1 and
w2), or a router [E, d] with E such and shared ones; a final norm [d]; an output head [V, d] unless it is tied. With
biases and a table of positions this is GPT-3's 12 l d^2 (1 + 13 / (12 d) + (V + s) / (12 l d)) (Narayanan et al. 2021,
arXiv 2104.04473, equation 2). Latent attention: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planner.shape import ModelShape
from phalanx.spec.layout import Layout


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameters by part. norms: with the biases. active_experts: those of the routed experts that one token passes."""

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
    """Parameters of one layer. ffn: the dense or shared one; experts: all routed ones; norms: with the biases;
    cut_biases: those of them that tensor parallelism cuts; latents: of attention, those that it does not cut.
    """

    attention: int
    ffn: int
    router: int
    experts: int
    norms: int
    cut_biases: int
    latents: int = 0


def layer_counts(model: ModelShape, *, dense: bool = False) -> LayerCounts:
    """Parameters of one layer, by part. dense: of one of the layers before the experts."""
    has_experts = model.num_experts > 0 and not dense
    width = model.num_shared_experts * model.expert_ffn_dim if has_experts else model.ffn_dim
    norms = 2 * model.dim
    if model.latent:
        norms += model.latent.query_rank + model.latent.kv_rank
    if model.qk_norm:
        norms += 2 * model.head_dim
    cut_biases = model.head_dim * (model.n_heads + 2 * model.n_kv_heads) if model.qkv_bias else 0
    if model.biases:
        # Two LayerNorms, and the outputs of query, key, value, their projection and the feed-forward's two products.
        norms += 4 * model.dim + model.head_dim * (model.n_heads + 2 * model.n_kv_heads) + width
    return LayerCounts(
        attention=_attention(model),
        ffn=num_ffn_products(model) * model.dim * width,
        router=model.num_experts * model.dim if has_experts else 0,
        experts=model.num_experts * expert_count(model) if has_experts else 0,
        norms=norms + cut_biases,
        cut_biases=cut_biases,
        latents=model.dim * model.latent.width if model.latent else 0,
    )


def _attention(model: ModelShape) -> int:
    return sum(rows * columns for rows, columns in attention_inputs(model)) + model.value_width * model.dim


def attention_inputs(model: ModelShape) -> list[tuple[int, int]]:
    """Rows and columns of the matrices of one layer's attention but the last."""
    latent = model.latent
    if latent is None:
        keys = model.n_kv_heads * model.head_dim
        return [(model.score_width, model.dim), (keys, model.dim), (keys, model.dim)]
    queries = [(model.score_width, model.dim)]
    if latent.query_rank:
        queries = [(latent.query_rank, model.dim), (model.score_width, latent.query_rank)]
    wide = model.n_heads * (latent.plain_dim + latent.value_dim)
    return [*queries, (latent.kv_rank + latent.rotary_dim, model.dim), (wide, latent.kv_rank)]


def shared_heads(model: ModelShape, tp: int) -> int:
    """Parameters of one layer that a tp rank has beyond its tp-th part: where tp is a multiple of n_kv_heads each rank
    holds the weights of a whole head of keys and values.
    """
    if model.latent or tp <= model.n_kv_heads:
        return 0
    of_one_head = 2 * model.head_dim * (model.dim + (1 if model.qkv_bias else 0))
    return of_one_head - of_one_head * model.n_kv_heads // tp


def num_ffn_products(model: ModelShape) -> int:
    """Matrix products of a feed-forward part: 3 with a gate, else 2."""
    return 3 if model.gated_ffn else 2


def expert_count(model: ModelShape) -> int:
    """Parameters of one routed expert."""
    return num_ffn_products(model) * model.dim * model.expert_ffn_dim


def count_parameters(model: ModelShape) -> ParameterCounts:
    """Parameters of the whole model, by part."""
    num_experts = model.num_expert_layers
    num_dense = model.n_layers - num_experts
    dense, expert = layer_counts(model, dense=True), layer_counts(model)
    table = model.vocab_size * model.dim
    final_norm = (1 + model.biases) * model.dim
    return ParameterCounts(
        embedding=table + model.max_positions * model.dim,
        attention=model.n_layers * expert.attention,
        ffn=num_dense * dense.ffn + num_experts * expert.ffn,
        router=num_experts * expert.router,
        experts=num_experts * expert.experts,
        active_experts=num_experts * model.top_k * expert_count(model),
        norms=num_dense * dense.norms + num_experts * expert.norms + final_norm,
        head=0 if model.tie_embeddings else table,
    )


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank before they are sharded over dp_shard.

    split: its part of what tensor parallelism cuts. whole: what every tp rank holds (norms, router, latents). experts:
    its part of the routed experts. block: of its biggest layer alone, without the experts; block_experts: of that
    layer's experts. copied: of the last stage's copy of a tied embedding, which `split` counts too; no optimizer has a
    state of it. head: of the output head, or the embedding that is used for it, which `ends` counts too.
    """

    split: int
    whole: int
    experts: int
    block: int
    block_experts: int
    ends: int
    copied: int = 0
    head: int = 0

    @property
    def dense(self) -> int:
        """All but the routed experts."""
        return self.split + self.whole

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def rank_parameters(
    model: ModelShape, layout: Layout, num_layers: int, *, is_first: bool, is_last: bool, num_dense: int | None = None
) -> RankParameters:
    """Parameters of a rank that holds `num_layers` layers, and the embedding (is_first) or final norm and head
    (is_last).

    num_dense: how many of its layers come before the experts; None: as many as can be, on the first rank. Over all pp,
    tp and ep ranks `split` (without what is `copied`) and `experts` sum to their totals, `whole` once for each tp rank,
    heads of keys and values that several tp ranks share once for each of those.
    """
    if num_dense is None:
        num_dense = min(model.num_dense_layers, num_layers) if is_first and model.num_experts else 0
    layer, first, tp = layer_counts(model), layer_counts(model, dense=True), layout.tp
    table = model.vocab_size * model.dim
    is_copy = model.tie_embeddings and is_last and layout.pp > 1
    num_tables = int(is_first) + int(is_last and not (model.tie_embeddings and is_first and not is_copy))
    shared = shared_heads(model, tp)
    block_split = (layer.attention - layer.latents + layer.ffn + layer.cut_biases) // tp + shared
    first_split = (first.attention - first.latents + first.ffn + first.cut_biases) // tp + shared
    block_whole = layer.norms - layer.cut_biases + layer.router + layer.latents
    first_whole = first.norms - first.cut_biases + first.latents
    block_experts = layer.experts // (tp * layout.ep)
    num_rest = num_layers - num_dense
    final_norm = (1 + model.biases) * model.dim if is_last else 0
    positions = model.max_positions * model.dim if is_first else 0
    return RankParameters(
        split=num_rest * block_split + num_dense * first_split + num_tables * table // tp,
        whole=num_rest * block_whole + num_dense * first_whole + final_norm + positions,
        experts=num_rest * block_experts,
        block=block_split + block_whole,
        block_experts=block_experts,
        ends=num_tables * table // tp + final_norm + positions,
        copied=table // tp if is_copy else 0,
        head=table // tp if is_last else 0,
    )
