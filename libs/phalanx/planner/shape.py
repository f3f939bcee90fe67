"""What the planner needs to know about a model and about a run: plain numbers, so that it stays pure and knows no job
file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Queries, keys and values from narrow latents (DeepSeek-V2, arXiv 2405.04434, section 2.1), widths in elements.

    query_rank 0: queries straight from the input. A head's query and key have plain_dim + rotary_dim elements, its
    value value_dim; the rotary part of the key is shared by all heads.
    """

    query_rank: int
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Elements of a token's latents, with the part of the key that positions turn."""
        return self.query_rank + self.kv_rank + self.rotary_dim


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped queries. num_experts = 0: dense, of width ffn_dim; else every layer after the first
    `num_dense_layers` is experts.

    head_width: of one head, where it is not dim / n_heads. gated_ffn: SwiGLU with three products, else two.
    window: keys that a token meets at most, in every `window_every`-th layer; 0: all. biases: LayerNorm and biased
    products, as in GPT-3, else RMSNorm and none. max_positions: rows of a learned table of positions. qk_norm: heads of
    queries and keys normalised, as in Qwen3. qkv_bias: biases of queries, keys and values alone, as in Qwen2.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    tie_embeddings: bool = False
    num_experts: int = 0
    top_k: int = 0
    expert_ffn_dim: int = 0
    num_shared_experts: int = 0
    head_width: int | None = None
    gated_ffn: bool = True
    num_dense_layers: int = 0
    latent: LatentAttention | None = None
    window: int = 0
    window_every: int = 1
    biases: bool = False
    max_positions: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head_width or self.dim // self.n_heads

    @property
    def score_width(self) -> int:
        """Elements of all heads' queries, which the scores are summed over."""
        return self.n_heads * (self.latent.plain_dim + self.latent.rotary_dim if self.latent else self.head_dim)

    @property
    def value_width(self) -> int:
        """Elements of all heads' values, so of what attention puts out."""
        return self.n_heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def num_expert_layers(self) -> int:
        """Layers whose feed-forward part is experts."""
        return self.n_layers - self.num_dense_layers if self.num_experts else 0

    def mean_keys(self, seq_len: int, *, causal: bool) -> float:
        """Keys that a token meets, mean over the tokens of a window and over the layers."""
        everywhere = (seq_len + 1) / 2 if causal else float(seq_len)
        if not self.window or self.window >= seq_len:
            return everywhere
        # The first tokens meet fewer than the window holds.
        inside = self.window - (self.window * (self.window - 1) / 2 / seq_len if causal else 0.0)
        return everywhere + (inside - everywhere) / self.window_every


@dataclass(frozen=True, slots=True)
class RunShape:
    """How a model is trained, as far as memory and time depend on it.

    zero: 0 (nothing sharded) to 3. schedule: of the pipeline, as pipeline_order names them. recompute: the inside of
    every `recompute_every`-th layer, without its matrix products and attention where keeps_products;
    recompute_attention: only the attention's scores and their neighbours; recompute_share: of a layer's
    operations that are computed again where `recompute` is off. param_bytes: of one weight in forward and backward;
    reduce_bytes: of one gradient on the wire. precision: of the matrix products, as compute names them.
    sequence_parallel: norms and residuals cut over tp. offloaded: share of the optimizer state, 0 to 1, that lies in
    the host's memory, and is updated on the GPU. cpu_offload: masters, reduced gradients and optimizer state lie there,
    and the host updates them. stage_split: layers of each stage of a pipeline, or the rule of `stage_split`
    that gives them, even or cost. chunk_tokens: whose logits exist at a time; 0 for those of a micro-batch.
    cp_comm_type: how attention sees a window that ranks share, all_gather or a2a. local_steps: for which replicas train
    by themselves between two outer updates; 0: not. compression: none, powersgd (of compression_rank;
    compresses_ends: the embedding and the head too) or onebit_adam.
    paging_bytes: of memory for pages of an optimizer state that lies on a local disk; 0 where it lies in memory.
    optimizer: adamw, or muon with ns_steps iterations, whose hidden matrices have one moment. plain_loss: of the
    cross-entropy alone, without the z-loss, by the trainer's own function.
    """

    seq_len: int
    global_batch_size: int
    local_batch_size: int = 1
    zero: int = 3
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: bool = False
    document_mask: bool = True
    param_bytes: int = 2
    reduce_bytes: int = 4
    recompute_attention: bool = False
    sequence_parallel: bool = True
    precision: str = "bf16"
    offloaded: float = 0.0
    recompute_share: float = 0.0
    chunk_tokens: int = 0
    cp_comm_type: str = "all_gather"
    cpu_offload: bool = False
    stage_split: str | tuple[int, ...] = "even"
    local_steps: int = 0
    paging_bytes: int = 0
    recompute_every: int = 1
    keeps_products: bool = False
    compression: str = "none"
    compression_rank: int = 0
    compresses_ends: bool = False
    optimizer: str = "adamw"
    ns_steps: int = 5
    plain_loss: bool = True

    @property
    def recompute_mode(self) -> str:
        """As `[activation_checkpoint] mode` names it."""
        return "none" if not self.recompute else "selective" if self.keeps_products else "full"

    @property
    def layers_again(self) -> float:
        """Share of the layers whose inside is computed again, 0 to 1."""
        return 1 / self.recompute_every if self.recompute else 0.0

    @property
    def products_again(self) -> float:
        """Share of the layers whose matrix products are computed again, 0 to 1."""
        return 0.0 if self.keeps_products else self.layers_again

    @property
    def has_apart_replicas(self) -> bool:
        """Whether replicas don't sum their gradients as ranks of one replica do."""
        return self.local_steps > 0 or self.compression != "none"
