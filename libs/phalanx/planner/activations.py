"""Activations that a rank holds for backward: an estimate, counted tensor by tensor as the decoder saves them.

After Korthikanti et al. 2022 (arXiv 2205.05198, section 4: s b h (34 + 5 a s / h) for GELU, full heads, stored scores
and dropout), counted anew for RMSNorm in fp32, SwiGLU, keys and values repeated for grouped queries, no stored scores,
no dropout. Bytes a token and layer, of tensors in b bytes, w = n_heads x head_dim, f the width of the SwiGLU that a
token passes:
- two norms: the fp32 input and the normalised one: 2 (4 + b) d; on a sequence shard, so over tp
- their outputs, which the products over d read: 2 b d, whole on every tp rank, as torch gathers and keeps them
- query, key, value and the attention's output, which lies as the next product reads it: 4 b w, and a fp32 sum for each
head; over tp. Keys and values are of the whole window where ranks of a context gather them
- norms of heads, where there are: (4 + b) (w + kv), with kv = n_kv_heads x head_dim; over tp
- SwiGLU: w1 x, silu of it, w3 x, their product: 4 b f; over tp
- latents r = query_rank + kv_rank + rotary_dim: what gives them, their fp32 norms, what these give: (4 + 2 b) r, whole
on every tp rank; queries and keys, which are put together from parts, the product that keys and values come from, and
the attention's output: b (2 q + w + v), over tp, with q of all heads' queries, v of their values, w of that product.
Keys and w are of the whole window where ranks of a context gather latents
- experts: each token's copy for each of its top_k: b d top_k, and fp32 router scores 4 E
Backward holds the gradients of one layer's inside beside it, which go as they come: half of it.

A recomputed layer keeps its input, b d over tp, and its inside exists while it is computed again. Selective recompute
also keeps what products and attention give: queries, keys and values b (w + 2 kv), the attention's output and fp32 sums
b w + 4 heads, w1 x and w3 x 2 b f, all over tp, and the two outputs of width d before they are summed over tp, 2 b d.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planner.head_memory import head_bytes
from phalanx.planner.pipeline_memory import (
    boundary_bytes,
    passes_by_half,
    passes_waiting_for_weights,
    waiting_bytes_per_token,
)
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.stages import PipelinePosition, layers_of_stages, stage_passes_in_flight
from phalanx.spec.layout import Layout
from phalanx.spec.parallel import ZERO_BUBBLE_SCHEDULES


def layer_bytes_per_token(
    model: ModelShape, layout: Layout, param_bytes: int, *, dense: bool = False, windows: int = 1
) -> float:
    """Bytes that one token leaves behind in one layer, without recompute. dense: of those before the experts. windows:
    how many times its tokens' keys and values, or latents, a rank has, as a rank of a context that gathers them.
    """
    norms = 2 * (4 + param_bytes) * model.dim / layout.tp
    gathered = 2 * param_bytes * model.dim
    heads = _heads_bytes(model, layout, param_bytes, windows)
    if model.qk_norm:
        heads += (4 + param_bytes) * model.head_dim * (model.n_heads + model.n_kv_heads) / layout.tp
    if dense or not model.num_experts:
        return norms + gathered + heads + 4 * param_bytes * model.ffn_dim / layout.tp
    passed = model.expert_ffn_dim * (model.top_k + model.num_shared_experts)
    routing = param_bytes * model.dim * model.top_k + 4 * model.num_experts
    return norms + gathered + heads + routing + 4 * param_bytes * passed / layout.tp


def _heads_bytes(model: ModelShape, layout: Layout, param_bytes: int, windows: int) -> float:
    sums = 4 * model.n_heads / layout.tp
    if model.latent is None:
        return (2 + 2 * windows) * param_bytes * model.n_heads * model.head_dim / layout.tp + sums
    wide = model.n_heads * (model.latent.plain_dim + model.latent.value_dim)
    own = param_bytes * (model.score_width + model.value_width) / layout.tp
    of_window = param_bytes * (model.score_width + wide) / layout.tp
    latents = (4 + 2 * param_bytes) * model.latent.width
    return own + sums + latents + windows * of_window


def kept_bytes_per_token(model: ModelShape, layout: Layout, run: RunShape, *, dense: bool = False) -> float:
    """Bytes that one token leaves behind in one layer that is recomputed. dense: as in `layer_bytes_per_token`."""
    kept = _input_bytes(model, layout, run)
    if not run.keeps_products:
        return kept
    made = (model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    if model.latent:
        wide = model.n_heads * (model.latent.plain_dim + model.latent.value_dim)
        made = model.score_width + wide * _windows(model, layout, run)
        kept += run.param_bytes * model.latent.width
    passed = model.ffn_dim
    if model.num_experts and not dense:
        passed = model.expert_ffn_dim * (model.top_k + model.num_shared_experts)
    cut = run.param_bytes * (made + model.value_width + 2 * passed) + 4 * model.n_heads
    return kept + cut / layout.tp + 2 * run.param_bytes * model.dim


def _windows(model: ModelShape, layout: Layout, run: RunShape) -> int:
    """How many times its own tokens a rank has keys and values of."""
    return layout.cp if run.cp_comm_type == "all_gather" else 1


def _input_bytes(model: ModelShape, layout: Layout, run: RunShape) -> float:
    return run.param_bytes * model.dim / layout.tp


def _is_again(layer: int, run: RunShape) -> bool:
    return run.recompute and layer % run.recompute_every == 0


def _more_in_backward(layers: range, run: RunShape, in_layer: float, computed_again: float) -> float:
    """What recompute needs at most beyond what backward has freed until then: layers after the last recomputed one."""
    last = next((layer for layer in reversed(layers) if _is_again(layer, run)), None)
    return 0.0 if last is None else max(computed_again - (layers.stop - 1 - last) * in_layer, 0.0)


def _is_dense(model: ModelShape, layer: int) -> bool:
    return model.num_experts > 0 and layer < model.num_dense_layers


@dataclass(frozen=True, slots=True)
class Activations:
    """Peak bytes at a pipeline position, by the moment: backward within a layer, with what it computes again, when most
    passes are in flight; within the first layer, when nothing but its inside is left; the loss of a micro-batch; the
    product of the head in backward. The latter two are 0 where the rank has no head.
    """

    in_layers: int
    in_first_layer: int
    in_loss: int = 0
    in_head: int = 0


def activation_bytes(model: ModelShape, layout: Layout, run: RunShape, position: PipelinePosition) -> Activations:
    """What is kept for every pass in flight, mask, what passes between stages and what a split backward keeps
    (`pipeline_memory`); beside it one layer's inside, or what head and loss hold (`head_memory`)."""
    tokens = run.seq_len * run.local_batch_size // layout.cp
    windows = _windows(model, layout, run)
    whole = {
        dense: layer_bytes_per_token(model, layout, run.param_bytes, dense=dense, windows=windows)
        for dense in (False, True)
    }
    again = {dense: kept_bytes_per_token(model, layout, run, dense=dense) for dense in (False, True)}
    stages = layers_of_stages(model, layout, run, position)
    kept = max(
        sum((again if _is_again(layer, run) else whole)[_is_dense(model, layer)] for layer in layers)
        for layers in stages
    )
    # Of a layer's inside the larger kind's, where a rank has both.
    kinds = {_is_dense(model, layer) for layers in stages for layer in layers}
    in_layer = max(whole[dense] for dense in kinds)
    computed_again = max(whole[dense] - again[dense] for dense in kinds) + _input_bytes(model, layout, run)
    inside = 0.5 * in_layer
    more = max(_more_in_backward(layers, run, in_layer, computed_again) for layers in stages)
    passes = stage_passes_in_flight(layout, run, position.pp_rank)
    mask = run.local_batch_size * run.seq_len**2 // layout.cp if run.document_mask else 0
    beside: float = passes * mask + boundary_bytes(model, layout, run, position)
    if waiting := passes_waiting_for_weights(layout, run, position.pp_rank):
        per_layer = waiting_bytes_per_token(model, layout, run.param_bytes)
        beside += waiting * tokens * per_layer * max(map(len, stages))
    in_flight, in_backward = passes * kept, passes * kept + more
    if run.recompute and layout.pp > 1 and run.schedule in ZERO_BUBBLE_SCHEDULES:
        inside_again = {dense: whole[dense] - again[dense] for dense in (False, True)}
        of_stage = max(sum(inside_again[_is_dense(model, n)] for n in layers if _is_again(n, run)) for layers in stages)
        in_flight = max(
            each * kept + halves * of_stage for each, halves in passes_by_half(layout, run, position.pp_rank)
        )
        in_backward = max(in_backward, in_flight)
    before = beside + tokens * in_flight
    in_layers = beside + tokens * (in_backward + inside)
    in_first_layer = tokens * (in_layer + inside) + mask
    if not position.is_last:
        return Activations(int(in_layers), int(in_first_layer))
    head = head_bytes(model, layout, run)
    return Activations(
        int(in_layers + head.behind),
        int(in_first_layer),
        int(before + head.in_loss),
        int(before + head.in_product),
    )
