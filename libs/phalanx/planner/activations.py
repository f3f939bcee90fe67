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
Backward holds the gradients of one layer's inside beside it, which go as they come: half of it.

A recomputed layer keeps its input, b d over tp, and its inside exists while it is computed again. Selective recompute
also keeps what products and attention give: queries, keys and values b (w + 2 kv), the attention's output and fp32 sums
b w + 4 heads, w1 x and w3 x 2 b f, all over tp, and the two outputs of width d before they are summed over tp, 2 b d.
"""

from __future__ import annotations

from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.stages import PipelinePosition, layers_of_stages, stage_passes_in_flight
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


def kept_bytes_per_token(model: ModelShape, layout: Layout, run: RunShape) -> float:
    """Bytes that one token leaves behind in one layer that is recomputed."""
    kept = _input_bytes(model, layout, run)
    if not run.keeps_products:
        return kept
    width, heads = model.n_heads * model.head_dim, model.n_heads + 2 * model.n_kv_heads
    passed = model.ffn_dim
    if model.num_experts:
        passed = model.expert_ffn_dim * (model.top_k + model.num_shared_experts)
    cut = run.param_bytes * (heads * model.head_dim + width + 2 * passed) + 4 * model.n_heads
    return kept + cut / layout.tp + 2 * run.param_bytes * model.dim


def _input_bytes(model: ModelShape, layout: Layout, run: RunShape) -> float:
    return run.param_bytes * model.dim / layout.tp


def _is_again(layer: int, run: RunShape) -> bool:
    return run.recompute and layer % run.recompute_every == 0


def _more_in_backward(layers: range, run: RunShape, in_layer: float, computed_again: float) -> float:
    """What recompute needs at most beyond what backward has freed until then: layers after the last recomputed one."""
    last = next((layer for layer in reversed(layers) if _is_again(layer, run)), None)
    return 0.0 if last is None else max(computed_again - (layers.stop - 1 - last) * in_layer, 0.0)


def activation_bytes(model: ModelShape, layout: Layout, run: RunShape, position: PipelinePosition) -> int:
    """Peak bytes at a pipeline position: what is kept for every pass in flight, one layer's inside, mask, and the
    head's logits."""
    tokens = run.seq_len * run.local_batch_size // layout.cp
    in_layer = layer_bytes_per_token(model, layout, run.param_bytes)
    again = kept_bytes_per_token(model, layout, run)
    computed_again = in_layer - (again - _input_bytes(model, layout, run))
    stages = layers_of_stages(model, layout, run, position)
    kept = max(sum(again if _is_again(layer, run) else in_layer for layer in layers) for layers in stages)
    inside = 0.5 * in_layer + max(_more_in_backward(layers, run, in_layer, computed_again) for layers in stages)
    passes = stage_passes_in_flight(layout, run, position.pp_rank)
    mask = run.local_batch_size * run.seq_len**2 // layout.cp if run.document_mask else 0
    total = tokens * (passes * kept + inside) + passes * mask
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
