"""Memory of one rank under a stack of the Megatron or FSDP family, where `memory` counts what Phalanx itself holds.

States as the ZeRO paper counts them (see `states`). Activations of a layer, bytes a token with width d, tp ranks t, and
the sequence cut or not: Korthikanti et al. 2022 (arXiv 2205.05198, sections 4 and 5), d (10 + 24 / t + 5 a s / (d t)),
d / t (34 + 5 a s / d) with sequence parallelism, without the last term where scores are recomputed or never stored;
here by part, so that grouped queries, gates and experts are counted too. Full recompute keeps 2 d, and one layer whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planner.compute import PRECISIONS
from phalanx.planner.parameters import RankParameters, rank_parameters
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.software import Software
from phalanx.planner.stages import PipelinePosition, positions, stage_passes_in_flight
from phalanx.planner.states import StateBytes, state_bytes
from phalanx.spec.layout import Layout

# Device context, library workspaces and communication buffers of a training process: a round figure of nvidia-smi.
CONTEXT_BYTES = 3 * 2**30
# Fragments that a caching allocator cannot use again: of the activations, which come and go.
FRAGMENTS = 0.10


@dataclass(frozen=True, slots=True)
class StackMemory:
    """Peak bytes of one rank at a pipeline position."""

    pp_rank: int
    states: StateBytes
    gathered_bytes: float
    activations_bytes: float
    head_bytes: float
    context_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it at once."""
        moving = (self.activations_bytes + self.head_bytes) * (1 + FRAGMENTS)
        return self.states.total + self.gathered_bytes + moving + self.context_bytes


def stack_memory(model: ModelShape, layout: Layout, run: RunShape, used: Software) -> tuple[StackMemory, ...]:
    """The memory of a rank at each pipeline position."""
    return tuple(_at(model, layout, run, used, position) for position in positions(model, layout, run))


def _at(model: ModelShape, layout: Layout, run: RunShape, used: Software, position: PipelinePosition) -> StackMemory:
    held = rank_parameters(
        model,
        layout,
        position.num_layers,
        is_first=position.is_first,
        is_last=position.is_last,
        num_dense=position.num_dense,
    )
    head = _head_bytes(model, layout, run, used) if position.is_last else 0.0
    activations = _activations(model, layout, run, used, position)
    states, gathered = _states(layout, run, used, held)
    context = CONTEXT_BYTES + used.buffers_gib * 2**30
    return StackMemory(position.pp_rank, states, gathered, activations, head, context)


def _states(layout: Layout, run: RunShape, used: Software, held: RankParameters) -> tuple[StateBytes, float]:
    """States of the shards, and what is whole beside them: weights and gradients of two layers at ZeRO 3."""
    ranks = layout.dp * layout.cp
    # Narrow formats keep a narrow copy of each weight beside the one of 2 bytes.
    weight = 2.0 if PRECISIONS[run.precision].bits >= 16 else 3.0
    parts = [
        state_bytes(count, shards, run.zero, weight_bytes=weight, gradient_bytes=used.held_gradient_bytes(run))
        for count, shards in ((held.dense, ranks), (held.experts, max(ranks // layout.ep, 1)))
    ]
    sharded = StateBytes(
        weights=sum(each.weights for each in parts),
        gradients=sum(each.gradients for each in parts),
        optimizer=sum(each.optimizer for each in parts) * (1 - run.offloaded),
    )
    if run.zero < 3:
        return sharded, 0.0
    if layout.pp > 1:
        # A pipeline keeps a stage's weights and gradients whole within a step.
        return sharded, (2.0 + used.held_gradient_bytes(run)) * held.total
    largest = max(held.block + held.block_experts, held.ends)
    return sharded, (2 * 2.0 + used.held_gradient_bytes(run)) * largest


def layer_bytes_per_token(model: ModelShape, layout: Layout, run: RunShape, used: Software, *, dense: bool) -> float:
    """Bytes that one token leaves behind in one layer without recompute."""
    tp, norm_shards = layout.tp, layout.tp if run.sequence_parallel else 1
    dropout = used.attention == "unfused"
    # Both norms' inputs; the inputs of the first product of each half, and the residual's dropout masks.
    whole = model.dim * (4 + 4 + (2 if dropout else 0)) / norm_shards
    keys_values = 2 * model.n_kv_heads * model.head_dim if not model.latent else model.score_width + model.value_width
    heads = 2 * (model.score_width + keys_values + model.value_width) / tp
    scores = 0.0
    if dropout and not run.recompute_attention:
        scores = 5 * model.n_heads * run.seq_len / tp
    width = model.ffn_dim if dense or not model.num_experts else model.num_shared_experts * model.expert_ffn_dim
    ways = 6 if model.gated_ffn else 4
    ffn = ways * width / tp
    if model.num_experts and not dense:
        # A copy of each token for each of its experts, before and after, and the experts' insides.
        ffn += model.top_k * (2 * 2 * model.dim / norm_shards + ways * model.expert_ffn_dim / tp)
    if PRECISIONS[run.precision].bits < 16:
        # Inputs of products are kept narrow: half of what products read.
        ffn *= 0.75
    return whole + heads + scores + ffn


def _activations(model: ModelShape, layout: Layout, run: RunShape, used: Software, position: PipelinePosition) -> float:
    tokens = run.seq_len * run.local_batch_size / layout.cp
    in_layer = layer_bytes_per_token(model, layout, run, used, dense=not model.num_experts)
    whole = 2.0 * model.dim / (layout.tp if run.sequence_parallel else 1)
    if run.recompute:
        # One layer whole, and the gradients of what it holds.
        kept, inside = whole, 2 * in_layer
    else:
        kept, inside = in_layer * (1 - run.recompute_share) + whole * (run.recompute_share > 0), in_layer
    passes = stage_passes_in_flight(layout, run, position.pp_rank)
    layers = position.num_layers / len(position.layers_by_stage)
    return tokens * (passes * layers * kept + inside)


def _head_bytes(model: ModelShape, layout: Layout, run: RunShape, used: Software) -> float:
    """Logits of 2 bytes, in fp32 and their gradient; fused losses hold less: only logits and gradient of 2 bytes."""
    tokens = run.seq_len * run.local_batch_size / layout.cp
    compiled = 6 if used.fused and used.year >= 2024 else 10
    return tokens * model.vocab_size / layout.tp * (4 if used.fused_loss else compiled)


def largest_memory(model: ModelShape, layout: Layout, run: RunShape, used: Software) -> StackMemory:
    """Of the pipeline position that holds most."""
    return max(stack_memory(model, layout, run, used), key=lambda each: each.total_bytes)
