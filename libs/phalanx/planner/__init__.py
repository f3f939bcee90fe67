"""The planner: exact counts of parameters and operations, and the memory of every rank, as pure functions of plain
numbers."""

from __future__ import annotations

from phalanx.planner.flops import TokenFlops, token_flops
from phalanx.planner.gpus import gpu_memory_bytes
from phalanx.planner.memory import RUNTIME_BYTES, RankMemory, rank_memory
from phalanx.planner.parameters import ParameterCounts, RankParameters, count_parameters, rank_parameters
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.stages import PipelinePosition, num_micro_batches, positions, stage_passes_in_flight

__all__ = [
    "RUNTIME_BYTES",
    "ModelShape",
    "ParameterCounts",
    "PipelinePosition",
    "RankMemory",
    "RankParameters",
    "RunShape",
    "TokenFlops",
    "count_parameters",
    "gpu_memory_bytes",
    "num_micro_batches",
    "positions",
    "rank_memory",
    "rank_parameters",
    "stage_passes_in_flight",
    "token_flops",
]
