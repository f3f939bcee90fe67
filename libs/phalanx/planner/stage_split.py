"""How many layers each stage of a pipeline has: the one rule of the planner and of the trainer.

Costs are operations of a token's forward and backward, as `flops` counts them, with the recompute where there is one. A
layer counts 1; the head what its product takes against a layer's; the embedding, a lookup of d elements whose gradients
are added to a table, 2 d operations: next to nothing, but of stages that are alike the first one is the last to get a
layer more. "cost" gives, one by one, each layer to the pipeline rank that would have least with it, and on that rank to
its stage that would, so the largest rank's cost is the least that whole layers allow: a schedule with m micro-batches
takes m times the slowest rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). "even" counts layers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from phalanx.planner.flops import token_flops
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.spec.parallel import V_SCHEDULES


def split_layers(n_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage: as even as can be, a layer more for the inner stages first, as the outer ones carry
    embedding and head."""
    base, extra = divmod(n_layers, num_stages)
    first_longer = (num_stages - extra) // 2
    return tuple(base + (first_longer <= stage < first_longer + extra) for stage in range(num_stages))


def stages_of_rank(schedule: str, pp: int, pp_rank: int, stages_per_rank: int) -> tuple[int, ...]:
    """Indices of the stages of a pipeline rank: r and 2 pp - 1 - r under V schedules, else r, r + pp, ..."""
    if schedule in V_SCHEDULES and pp > 1:
        return (pp_rank, pp * stages_per_rank - 1 - pp_rank)
    return tuple(range(pp_rank, pp * stages_per_rank, pp))


def stage_layers(model: ModelShape, pp: int, run: RunShape) -> tuple[int, ...]:
    """Layers of each stage, in the order of the model. pp: pipeline ranks. With more stages than layers some are 0."""
    per_rank = run.stages_per_rank if pp > 1 else 1
    num_stages = pp * per_rank
    if not isinstance(run.stage_split, str):
        assert len(run.stage_split) == num_stages and sum(run.stage_split) == model.n_layers, "spec refuses others"
        return run.stage_split
    if run.stage_split == "even" or pp == 1 or num_stages > model.n_layers:
        return split_layers(model.n_layers, num_stages)
    first, last = end_costs(model, run)
    ranks = tuple(stages_of_rank(run.schedule, pp, rank, per_rank) for rank in range(pp))
    return balanced(model.n_layers, ranks, first, last)


def end_costs(model: ModelShape, run: RunShape) -> tuple[float, float]:
    """What embedding and head cost, in layers."""
    flops = token_flops(model, run.seq_len, causal=True, recompute=run.products_again)
    head = 3 * 2.0 * model.vocab_size * model.dim
    layer = (flops.hardware - head) / model.n_layers
    return 2.0 * model.dim / layer, head / layer


@lru_cache(maxsize=4096)
def balanced(n_layers: int, ranks: tuple[tuple[int, ...], ...], first: float, last: float) -> tuple[int, ...]:
    """Layers of each stage, one at least, by cost. ranks: the stages of each. first, last: costs of the ends, in
    layers."""
    num_stages = sum(map(len, ranks))
    ends = {0: first, num_stages - 1: last}
    costs = [1 + ends.get(stage, 0.0) for stage in range(num_stages)]
    totals = [sum(costs[stage] for stage in stages) for stages in ranks]
    layers = [1] * num_stages
    for _ in range(n_layers - num_stages):
        rank = _lightest(totals, range(len(ranks)))
        stage = _lightest(costs, ranks[rank])
        layers[stage] += 1
        costs[stage] += 1
        totals[rank] += 1
    return tuple(layers)


def _lightest(costs: Sequence[float], among: Sequence[int]) -> int:
    """The cheapest; of equal ones the one nearest to the middle."""
    middle = (len(costs) - 1) / 2
    return min(among, key=lambda each: (round(costs[each], 9), abs(each - middle), each))
