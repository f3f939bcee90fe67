"""What the planner needs to know about a model and about a run: plain numbers, so that it stays pure and knows no job
file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with RMSNorm, grouped queries and SwiGLU. num_experts = 0: dense, of width ffn_dim; else every layer is
    experts."""

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

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads


@dataclass(frozen=True, slots=True)
class RunShape:
    """How a model is trained, as far as memory depends on it. param_bytes: of one weight in forward and backward."""

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
