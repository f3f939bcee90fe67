"""Activations that a rank holds for backward: an estimate, counted tensor by tensor as the decoder saves them.

After Korthikanti et al. 2022 (arXiv 2205.05198, section 4: s b h (34 + 5 a s / h) for GELU, full heads, stored scores
and dropout), counted anew for RMSNorm in fp32, SwiGLU, keys and values repeated for grouped queries, no stored scores,
no dropout. Bytes a token and layer, of tensors in b bytes, w = n_heads x head_dim, f the width of the SwiGLU that a
token passes:
- two norms: the fp32 input and the normalised one: 2 (4 + b) d; on a sequence shard, so over tp
- their outputs, which the products over d read: 2 b d, whole on every tp rank, as torch gathers and keeps them
- query, key, value and the attention's output, which lies as the next product reads it: 4 b w, and a fp32 sum for each
head; over tp
- norms of heads, where there are: (4 + b) (w + kv), with kv = n_kv_heads x head_dim; over tp
- SwiGLU: w1 x, silu of it, w3 x, their product: 4 b f; over tp
- experts: each token's copy for each of its top_k: b d top_k, and fp32 router scores 4 E
Backward holds the gradients of one layer's inside beside it, which go as they come: half of it. Full recompute keeps
the input of each layer, b d over tp, and one layer's inside while it is computed again.
"""

from __future__ import annotations

from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.stages import PipelinePosition, stage_passes_in_flight
from phalanx.spec.layout import Layout

# Logits in computation type, their fp32 copy for the loss, and its gradient.
_LOGIT_FP32_BYTES = 8


def layer_bytes_per_token(model: ModelShape, layout: Layout, param_bytes: int) -> float:
    """Bytes that one token leaves behind in one layer, without recompute."""
    width = model.n_heads * model.head_dim
    norms = 2 * (4 + param_bytes) * model.dim / layout.tp
    gathered = 2 * param_bytes * model.dim
    heads = (4 * param_bytes * width + 4 * model.n_heads) / layout.tp
    if model.qk_norm:
        heads += (4 + param_bytes) * model.head_dim * (model.n_heads + model.n_kv_heads) / layout.tp
    if not model.num_experts:
        return norms + gathered + heads + 4 * param_bytes * model.ffn_dim / layout.tp
    passed = model.expert_ffn_dim * (model.top_k + model.num_shared_experts)
    routing = param_bytes * model.dim * model.top_k + 4 * model.num_experts
    return norms + gathered + heads + routing + 4 * param_bytes * passed / layout.tp


def activation_bytes(model: ModelShape, layout: Layout, run: RunShape, position: PipelinePosition) -> int:
    """Peak bytes at a pipeline position: what is kept for every pass in flight, one layer's inside, mask, and the
    head's logits."""
    tokens = run.seq_len * run.local_batch_size // layout.cp
    in_layer = layer_bytes_per_token(model, layout, run.param_bytes)
    kept = run.param_bytes * model.dim / layout.tp if run.recompute else in_layer
    layers_per_stage = max(position.layers_by_stage)
    passes = stage_passes_in_flight(layout, run, position.pp_rank)
    inside = 1.5 * in_layer if run.recompute else 0.5 * in_layer
    mask = run.local_batch_size * run.seq_len**2 // layout.cp if run.document_mask else 0
    total = tokens * (passes * layers_per_stage * kept + inside) + passes * mask
    if position.is_last:
        columns = model.vocab_size / layout.tp
        chunk = min(run.chunk_tokens or tokens, tokens)
        logits = chunk * columns * (run.param_bytes + _LOGIT_FP32_BYTES)
        final = tokens * model.dim * ((4 + run.param_bytes) / layout.tp + run.param_bytes)
        heads_in_flight = passes if run.schedule == "gpipe" and layout.pp > 1 else 1
        if run.chunk_tokens:  # of one chunk, and the sum of their gradients of the head in fp32
            total += heads_in_flight * final + logits + 4 * columns * model.dim
        else:
            total += heads_in_flight * (logits + final)
    return int(total)
