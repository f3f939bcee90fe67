"""What a pipeline rank holds beside its layers' activations: what passes between stages, and what a split backward
keeps for the weights.

A pass in flight keeps its stage's input and output, unless that is an end of the model; and of every stage an input and
a gradient may be on their way (`phalanx.parallel.stage`). A tensor is a micro-batch's tokens x dim.
"""

from __future__ import annotations

from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.stages import PipelinePosition, num_micro_batches, stage_passes_in_flight
from phalanx.spec.layout import Layout


def boundary_bytes(model: ModelShape, layout: Layout, run: RunShape, position: PipelinePosition) -> int:
    """Bytes of what passes between stages, when most passes are in flight; 0 without a pipeline."""
    if layout.pp == 1:
        return 0
    tensor = run.seq_len * run.local_batch_size // layout.cp * model.dim * run.param_bytes // layout.tp
    stages, micro_batches = len(position.stages), num_micro_batches(layout, run)
    receiving, sending = stages - position.is_first, stages - position.is_last
    in_flight = min(stage_passes_in_flight(layout, run, position.pp_rank) / stages, micro_batches)
    # In fp32 the input of a pass in flight is what its first norm keeps, else what recompute begins with: the layer
    # counts both.
    is_counted = run.param_bytes == 4 or (run.recompute and run.recompute_every == 1)
    kept = sending + (0 if is_counted else receiving)
    tensors = in_flight * kept + receiving + sending
    return int(tensor * tensors)


def passes_waiting_for_weights(layout: Layout, run: RunShape, pp_rank: int) -> int:
    """Passes, of those in flight, whose inputs' gradients are there and whose weights' gradients are not.

    ZB-V computes both in turn; interleaved zero bubble puts those of the weights off by a pass for each rank before
    (`pipeline_order`); DualPipeV splits a backward in its warm-up and its end alone.
    """
    if layout.pp == 1:
        return 0
    if run.schedule == "zbv":
        return 1
    return pp_rank + 1 if run.schedule == "interleaved_zero_bubble" else 0


def passes_by_half(layout: Layout, run: RunShape, pp_rank: int) -> tuple[tuple[int, int], ...]:
    """For moments of a step that no other has both more than: passes in flight, and how many of them wait for their
    weights with what the first half of their backward computed again. A pass of the model's first stage has no first
    half: nobody wants the gradients of tokens.

    As the orders of `pipeline_order` go: with interleaved zero bubble as many wait as `passes_waiting_for_weights`
    says, all the time. ZB-V and DualPipeV hold most while one waits, or none; on later ranks more wait in the last part
    of a step, when fewer are in flight.
    """
    pp, everything = layout.pp, num_micro_batches(layout, run) * run.stages_per_rank
    if run.schedule == "interleaved_zero_bubble":
        found = [(run.stages_per_rank * pp, pp_rank + 1)]
    elif run.schedule == "zbv":
        found = [(2 * pp, 1), (pp + pp_rank, 2 * pp_rank + 1)]
    else:
        found = [(2 * pp + 1, 0), (2 * pp, int(pp_rank < pp - 1)), (pp, pp_rank + 1)]
    return tuple((min(passes, everything), min(waiting, everything)) for passes, waiting in found)


def waiting_bytes_per_token(model: ModelShape, layout: Layout, param_bytes: int) -> float:
    """Bytes that one token keeps in one layer between the two halves of a split backward: the gradient of what each
    product and each norm gives.
    """
    width, kv_width = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    cut = width + 2 * kv_width
    if not model.num_experts:
        return param_bytes * (4 * model.dim + (cut + 2 * model.ffn_dim) / layout.tp)
    passed = model.expert_ffn_dim * (model.top_k + model.num_shared_experts)
    per_expert = (model.top_k + 3) * model.dim + model.num_experts
    return param_bytes * (per_expert + (cut + 2 * passed) / layout.tp)
