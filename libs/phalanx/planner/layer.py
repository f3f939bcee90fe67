"""Seconds of one layer, forward and backward, for one micro-batch on one rank: computation and traffic inside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.planner.collectives import all_gather_s, all_reduce_s, all_to_all_s
from phalanx.planner.compute import PRECISIONS, Chip
from phalanx.planner.network import Cluster
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.spec.layout import Layout


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer (or of the model's head) for one micro-batch. tensor, context, expert: traffic of these axes
    that is seen beside the computation, forward and backward together; recompute: computation done a second time."""

    forward: float
    backward: float
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.recompute + self.tensor + self.context + self.expert


@dataclass(frozen=True, slots=True)
class Place:
    """What a layer's time depends on, beside the layer."""

    model: ModelShape
    layout: Layout
    run: RunShape
    cluster: Cluster
    chip: Chip

    @property
    def tokens(self) -> float:
        """Of one micro-batch on one rank."""
        return self.run.seq_len * self.run.local_batch_size / self.layout.cp

    @property
    def norm_shards(self) -> int:
        """Ranks that norms and residuals are cut over."""
        return self.layout.tp if self.run.sequence_parallel else 1


def layer_time(place: Place, *, dense: bool) -> LayerTime:
    """One layer. dense: whether its feed-forward part is dense (each layer of a model without experts)."""
    chip, run = place.chip, place.run
    forward, backward = _products(place, dense=dense)
    attention_forward, attention_backward = _attention(place)
    moved = chip.moved_s(_moved_bytes(place, dense=dense))
    forward += attention_forward + moved
    # Backward reads what the forward wrote, and the gradients beside it.
    backward += attention_backward + 2 * moved
    host = chip.calibration.layer_s if dense or chip.software.graphs else chip.calibration.routed_s
    forward, backward = max(forward, host), max(backward, 1.5 * host)
    recompute = run.products_again * forward
    if run.keeps_products:
        recompute = run.layers_again * moved
    elif run.recompute_attention and not run.recompute:
        recompute = attention_forward
    recompute = max(recompute, run.recompute_share * forward)
    return LayerTime(
        forward=forward,
        backward=backward,
        recompute=recompute,
        tensor=_tensor_traffic(place, forward + backward),
        context=_context_traffic(place, attention_forward + attention_backward),
        expert=0.0 if dense else _expert_traffic(place),
    )


def head_time(place: Place) -> LayerTime:
    """The head's product and the loss: logits are written, read for the loss in fp32, and their gradient written."""
    model, chip, tokens = place.model, place.chip, place.tokens
    columns = model.vocab_size / place.layout.tp
    product = chip.product_s(tokens, columns, model.dim, PRECISIONS["bf16"])
    loss = chip.moved_s(tokens * columns * 6)
    again = product if place.run.chunk_tokens else 0.0  # chunks of logits are computed once more in backward
    return LayerTime(forward=product + loss, backward=2 * product + again + loss)


def _products(place: Place, *, dense: bool) -> tuple[float, float]:
    """Forward and backward of all matrix products but attention's; backward makes two of each and adds into gradients
    of 4 bytes."""
    chip, tokens = place.chip, place.tokens
    forward = backward = converted = 0.0
    for count, rows, columns, inner in _shapes(place, dense=dense):
        forward += count * chip.product_s(rows, columns, inner)
        backward += count * (
            chip.product_s(rows, inner, columns)
            + chip.product_s(inner, columns, rows)
            + 6 * inner * columns / chip.memory_rate
        )
        converted += count * rows * (inner + columns)
    convert_s = chip.precision.convert_bytes * converted / chip.memory_rate / 2
    if place.model.num_experts and not dense:
        router = chip.product_s(
            tokens / place.norm_shards, place.model.num_experts, place.model.dim, PRECISIONS["fp32"]
        )
        forward, backward = forward + router, backward + 2 * router
    return forward + convert_s, backward + convert_s


def _shapes(place: Place, *, dense: bool) -> list[tuple[float, float, float, float]]:
    """(how many, m, n, k) of the products of a layer's forward."""
    model, tp, tokens = place.model, place.layout.tp, place.tokens
    shapes: list[tuple[float, float, float, float]] = []
    if model.latent:
        latent = model.latent
        from_input = latent.query_rank or model.dim
        narrow = latent.query_rank + latent.kv_rank + latent.rotary_dim
        wide = model.n_heads * (latent.plain_dim + latent.value_dim) / tp
        shapes += [(1, tokens, narrow, model.dim), (1, tokens, model.score_width / tp, from_input)]
        # Where ranks of a context gather latents each makes keys and values of the whole window.
        copies = place.layout.cp if place.run.cp_comm_type == "all_gather" else 1
        shapes.append((1, copies * tokens, wide, latent.kv_rank))
    else:
        heads = model.n_heads + 2 * model.n_kv_heads
        shapes.append((1, tokens, heads * model.head_dim / tp, model.dim))
    shapes.append((1, tokens, model.dim, model.value_width / tp))
    ways_in = 2 if model.gated_ffn else 1
    width = model.ffn_dim if dense or not model.num_experts else model.num_shared_experts * model.expert_ffn_dim
    if width:
        shapes += [(1, tokens, ways_in * width / tp, model.dim), (1, tokens, model.dim, width / tp)]
    if model.num_experts and not dense:
        # Every rank of ep sends and receives alike: tokens x top_k rows in all, in its own experts.
        held = max(model.num_experts / place.layout.ep, 1)
        rows = tokens * model.top_k / held
        expert = model.expert_ffn_dim / tp
        shapes += [(held, rows, ways_in * expert, model.dim), (held, rows, model.dim, expert)]
    return shapes


def _attention(place: Place) -> tuple[float, float]:
    """Mean of a layer; those with a window have no fused kernel in some stacks and compute all scores."""
    model, run, tp, used = place.model, place.run, place.layout.tp, place.chip.software
    per_key = 2 * place.tokens * (model.score_width + model.value_width) / tp
    scores = place.tokens * run.seq_len * model.n_heads / tp
    unfused = place.chip.attention_s(per_key * run.seq_len, scores, fused=False)
    if used.attention == "unfused":
        return unfused
    whole = replace(model, window=0) if not used.window_kernels else model
    fused = place.chip.attention_s(per_key * whole.mean_keys(run.seq_len, causal=True), scores, fused=True)
    share = 1 / model.window_every if model.window and not used.window_kernels else 0.0
    return fused[0] + share * (unfused[0] - fused[0]), fused[1] + share * (unfused[1] - fused[1])


def _moved_bytes(place: Place, *, dense: bool) -> float:
    """Bytes that the element-wise operations of a forward read and write: two norms (4 d), two residuals (6 d), rotary
    positions (twice queries and keys), the activation (3 f gated, else 2 f), and for experts the sorting of tokens, out
    and back (4 d top_k); 2 bytes an element."""
    model, tp, tokens = place.model, place.layout.tp, place.tokens
    whole = 10 * model.dim / place.norm_shards
    rotary = 2 * (model.score_width + model.n_kv_heads * model.head_dim) / tp
    if model.latent:  # of queries a part, of keys one for all heads; and keys are put together
        rotary = 2 * model.latent.rotary_dim * (model.n_heads / tp + 1) + 2 * model.score_width / tp
    per_width = 3 if model.gated_ffn else 2
    if dense or not model.num_experts:
        return 2 * tokens * (whole + rotary + per_width * model.ffn_dim / tp)
    width = model.expert_ffn_dim * (model.top_k + model.num_shared_experts)
    sorting = 4 * model.dim * model.top_k
    return 2 * tokens * (whole + rotary + per_width * width / tp + sorting)


def _tensor_traffic(place: Place, compute_s: float) -> float:
    """Two all-reduces forward and two backward, or as many pairs of gather and scatter over the sequence (and one
    gather more in backward, which runs beside a product); recompute does the forward's again."""
    tp, run, constants = place.layout.tp, place.run, place.chip.calibration
    if tp == 1:
        return 0.0
    group = place.cluster.group(tp, 1, constants.nvlink_share, constants.network_share)
    num_bytes = 2 * place.tokens * place.model.dim
    one = 2 * all_gather_s(num_bytes, group) if run.sequence_parallel else all_reduce_s(num_bytes, group)
    seconds = (4 + 2 * run.layers_again) * one
    if place.chip.software.overlaps_tensor and run.sequence_parallel:
        return seen(seconds, compute_s, constants.exposed_tensor)
    return seconds


def _context_traffic(place: Place, attention_s: float) -> float:
    """Keys and values of the whole window, or the latents that they come from, come to every rank of cp, and their
    gradients go back, beside attention; or each rank exchanges its tokens for some of the heads by all-to-all."""
    cp, constants = place.layout.cp, place.chip.calibration
    if cp == 1:
        return 0.0
    group = place.cluster.group(cp, place.layout.tp, constants.nvlink_share, constants.network_share)
    model = place.model
    if place.run.cp_comm_type == "a2a":  # queries, keys, values there and the result back; nothing runs beside it
        kv_heads = max(model.n_kv_heads, cp * place.layout.tp)
        width = 2 * (model.n_heads + kv_heads) * model.head_dim / place.layout.tp
        if model.latent:
            width = 2 * (model.score_width + model.value_width) / place.layout.tp
        return (2 + place.run.layers_again) * all_to_all_s(2 * place.tokens * width, group)
    per_token = 4 * model.n_kv_heads * model.head_dim / place.layout.tp
    if model.latent:  # whole on every tp rank
        per_token = 2 * (model.latent.kv_rank + model.latent.rotary_dim)
    num_bytes = per_token * place.run.seq_len * place.run.local_batch_size
    passes = 3 + place.run.layers_again
    return seen(passes * all_gather_s(num_bytes, group), attention_s, constants.exposed_tensor)


def _expert_traffic(place: Place) -> float:
    """Tokens go to their experts and come back, forward and backward: four all-to-alls of 2 bytes an element, cut over
    tp where the sequence is. Not overlapped: only pairs of micro-batches would (DualPipe)."""
    layout, model, constants = place.layout, place.model, place.chip.calibration
    if layout.ep == 1:
        return 0.0
    group = place.cluster.group(layout.ep, layout.tp, constants.nvlink_share, constants.network_share)
    num_bytes = 2 * place.tokens * model.top_k * model.dim / place.norm_shards
    return (4 + 2 * place.run.layers_again) * all_to_all_s(num_bytes, group)


def seen(traffic_s: float, compute_s: float, exposed: float) -> float:
    """What is seen of traffic that runs beside computation: all that is longer than it, and always a share."""
    return max(traffic_s - compute_s * (1 - exposed), exposed * traffic_s)
