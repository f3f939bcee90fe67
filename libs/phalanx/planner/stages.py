"""Which layers a pipeline rank holds, and how many micro-batches are in flight on it at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.stage_split import dense_layers, stage_layers, stages_of_rank
from phalanx.spec.layout import Layout
from phalanx.spec.parallel import V_SCHEDULES

_MULTIPLE_OF_PP = {"1f1b": 1, "interleaved_1f1b": 1, "interleaved_zero_bubble": 1, "dualpipev": 2}


@dataclass(frozen=True, slots=True)
class PipelinePosition:
    """What one pipeline rank holds: its stages, the layers of each, and whether the model's ends are among them.
    num_dense: of its layers, those before the experts; 0 in a model without experts.
    """

    pp_rank: int
    stages: tuple[int, ...]
    layers_by_stage: tuple[int, ...]
    is_first: bool
    is_last: bool
    num_dense: int = 0

    @property
    def num_layers(self) -> int:
        """Layers of all its stages."""
        return sum(self.layers_by_stage)


def positions(model: ModelShape, layout: Layout, run: RunShape) -> tuple[PipelinePosition, ...]:
    """Every pipeline rank's part, by `stage_split`."""
    layers = stage_layers(model, layout.pp, run)
    dense, last = dense_layers(model, layers), len(layers) - 1
    placed = []
    for rank in range(layout.pp):
        stages = stages_of_rank(run.schedule, layout.pp, rank, len(layers) // layout.pp)
        held = tuple(layers[stage] for stage in stages)
        num_dense = sum(dense[stage] for stage in stages)
        placed.append(PipelinePosition(rank, stages, held, 0 in stages, last in stages, num_dense))
    return tuple(placed)


def layers_of_stages(model: ModelShape, layout: Layout, run: RunShape, position: PipelinePosition) -> tuple[range, ...]:
    """Numbers of the layers that each stage of a pipeline rank holds."""
    counts = stage_layers(model, layout.pp, run)
    starts = [0, *accumulate(counts)]
    return tuple(range(starts[stage], starts[stage + 1]) for stage in position.stages)


def num_micro_batches(layout: Layout, run: RunShape) -> int:
    """Micro-batches of one step: ceil(global / (dp x local)), with a pipeline rounded up to what the schedule
    admits."""
    slots = math.ceil(run.global_batch_size / (layout.dp * run.local_batch_size))
    multiple = layout.pp * _MULTIPLE_OF_PP.get(run.schedule, 0) if layout.pp > 1 else 1
    return math.ceil(slots / max(multiple, 1)) * max(multiple, 1)


def stage_passes_in_flight(layout: Layout, run: RunShape, pp_rank: int) -> int:
    """Most (micro-batch, stage) pairs whose activations a pipeline rank holds at once.

    GPipe holds all, and so does looped breadth-first (Lamy-Poirier 2023, arXiv 2211.05953, section 3). 1F1B: pp - r
    (Narayanan et al. 2021, section 2.2.1). Interleaved with v stages: the warm-up of the same paper, 2 (pp - r - 1) +
    (v - 1) pp, and one more. ZB-V holds pp micro-batches' worth of two stages, DualPipeV one stage's more (Qi et al.
    2024, arXiv 2405.15362, table 1; DualPipe README). ZB1P holds as many as 1F1B, ZB2P twice as many (Qi et al. 2024,
    arXiv 2401.10241, table 1). Interleaved zero bubble holds v pp on every rank: its warm-up is shorter on later ranks
    by as many passes as wait there for their weights' backward.
    """
    micro_batches, pp, per_rank = num_micro_batches(layout, run), layout.pp, run.stages_per_rank
    if pp == 1:
        return 1
    everything = micro_batches * per_rank
    if run.schedule in {"gpipe", "looped_bfs"}:
        return everything
    if run.schedule in {"1f1b", "zb1p"}:
        return min(everything, pp - pp_rank)
    if run.schedule == "zb2p":
        return min(everything, 2 * (pp - pp_rank) - 1)
    if run.schedule in V_SCHEDULES:
        return min(everything, 2 * pp + (run.schedule == "dualpipev"))
    if run.schedule == "interleaved_zero_bubble":
        return min(everything, per_rank * pp)
    return min(everything, 2 * (pp - pp_rank - 1) + (per_rank - 1) * pp + 1)
