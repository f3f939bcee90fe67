"""How many layers each stage of a pipeline has: the one rule of the planner and of the trainer.

Costs are operations of a token's forward and backward, as `flops` counts them, with the recompute where there is one. A
layer counts 1; the head what its product takes against a layer's; the embedding, a lookup of d elements whose gradients
are added to a table, 2 d operations: next to nothing, but of stages that are alike the first one is the last to get a
layer more. "cost" gives, one by one, each layer to the pipeline rank that would have least with it, and on that rank to
its stage that would, so the largest rank's cost is the least that whole layers allow: a schedule with m micro-batches
takes m times the slowest rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Where the first layers are dense
and the others experts, a layer of experts counts 1, and layers then move from stage to stage as long as that makes the
dearest rank, or of equal ones the next, cheaper. "even" counts layers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, permutations

from phalanx.planner.flops import token_flops
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.spec.parallel import V_SCHEDULES


@lru_cache(maxsize=4096)
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
    found = balanced(model.n_layers, ranks, first, last)
    if not model.num_experts or not model.num_dense_layers:
        return found
    return _with_dense(found, ranks, model.num_dense_layers, dense_cost(model, run), first, last)


@lru_cache(maxsize=4096)
def _with_dense(
    start: tuple[int, ...], ranks: tuple[tuple[int, ...], ...], num_dense: int, dense: float, first: float, last: float
) -> tuple[int, ...]:
    """From `start` layer by layer to a cut that no layer moved from one stage to another makes cheaper. dense: what
    each of the first `num_dense` layers costs; others as in `balanced`.
    """

    def rank_costs(layers: tuple[int, ...]) -> list[float]:
        held = zip(layers, _dense_of_stages(num_dense, layers), strict=True)
        costs = [count + (dense - 1) * wide for count, wide in held]
        costs[0] += first
        costs[-1] += last
        return sorted((round(sum(costs[stage] for stage in stages), 9) for stages in ranks), reverse=True)

    best, cut = rank_costs(start), start
    while True:
        moved = [_moved(cut, a, b) for a, b in permutations(range(len(cut)), 2) if cut[a] > 1]
        costs, found = min(((rank_costs(each), each) for each in moved), default=(best, cut))
        if costs >= best:
            return cut
        best, cut = costs, found


def _moved(layers: tuple[int, ...], origin: int, target: int) -> tuple[int, ...]:
    return tuple(count - (stage == origin) + (stage == target) for stage, count in enumerate(layers))


def dense_layers(model: ModelShape, layers: Sequence[int]) -> tuple[int, ...]:
    """Of stages of so many layers each, how many of these are before the experts; 0 in a model without experts."""
    return _dense_of_stages(model.num_dense_layers if model.num_experts else 0, layers)


def _dense_of_stages(num_dense: int, layers: Sequence[int]) -> tuple[int, ...]:
    if not num_dense:
        return (0,) * len(layers)
    ends = list(accumulate(layers))
    return tuple(min(end, num_dense) - min(end - count, num_dense) for end, count in zip(ends, layers, strict=True))


def dense_cost(model: ModelShape, run: RunShape) -> float:
    """What a layer before the experts costs, in layers with experts."""
    flops = [
        token_flops(replace(model, num_dense_layers=count), run.seq_len, causal=True, recompute=run.products_again)
        for count in (0, 1)
    ]
    with_experts = (flops[0].hardware - _head_flops(model)) / model.n_layers
    return 1 + (flops[1].hardware - flops[0].hardware) / with_experts


def _head_flops(model: ModelShape) -> float:
    return 3 * 2.0 * model.vocab_size * model.dim


def end_costs(model: ModelShape, run: RunShape) -> tuple[float, float]:
    """What embedding and head cost, in layers; with experts in layers that have them."""
    counted = replace(model, num_dense_layers=0) if model.num_experts else model
    flops = token_flops(counted, run.seq_len, causal=True, recompute=run.products_again)
    head = _head_flops(model)
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
