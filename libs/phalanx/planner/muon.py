"""What Muon takes beside an element-wise update: operations of its iteration, and whole matrices on their way.

A Newton-Schulz iteration of a matrix of s x l elements, s <= l, is three products: X X^T, its square, and what both
give times X: 4 s^2 l + 2 s^3 operations (Keller Jordan et al. 2024, kellerjordan.github.io/posts/muon). Matrices are
dealt out to the ranks that hold a stage; each is summed in fp32 on its owner, and sent from there to all of them, which
is the traffic of an all-reduce.
"""

from __future__ import annotations

import math

from phalanx.planner.collectives import Group, all_reduce_s
from phalanx.planner.compute import PRECISIONS, Chip
from phalanx.planner.parameters import attention_inputs, num_ffn_products
from phalanx.planner.shape import ModelShape, RunShape


def hidden_matrices(model: ModelShape) -> list[tuple[int, int]]:
    """Rows and columns of the matrices of one dense layer."""
    inward = attention_inputs(model)
    inward += [(model.ffn_dim, model.dim)] * (num_ffn_products(model) - 1)
    return [*inward, (model.dim, model.value_width), (model.dim, model.ffn_dim)]


def iteration_flops(rows: int, columns: int) -> int:
    """Operations of one Newton-Schulz iteration."""
    small, large = min(rows, columns), max(rows, columns)
    return 4 * small * small * large + 2 * small**3


def update_s(model: ModelShape, run: RunShape, num_layers: int, chip: Chip, group: Group) -> float:
    """Seconds of a step for a stage of num_layers layers; 0 for other optimizers. group: of the ranks that hold it."""
    if run.optimizer != "muon":
        return 0.0
    matrices = hidden_matrices(model)
    owned = math.ceil(num_layers * len(matrices) / group.ranks)
    mean_flops = sum(iteration_flops(*each) for each in matrices) / len(matrices)
    precision = PRECISIONS["fp32" if run.param_bytes == 4 or run.precision == "fp16" else "bf16"]
    computed = owned * run.ns_steps * mean_flops / chip.product_rate(precision)
    return computed + all_reduce_s(4 * num_layers * sum(math.prod(each) for each in matrices), group)
