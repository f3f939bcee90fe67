"""Layers of each pipeline stage: by cost, even, or stated; the same for the planner and the model that trains."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.planner import ModelShape, RunShape, positions, token_flops
from phalanx.planner.stage_split import balanced, dense_cost, end_costs, split_layers, stage_layers, stages_of_rank
from phalanx.spec import Layout

SHAPE = {"dim": 32, "n_layers": 12, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 512}
MODEL = ModelShape(**SHAPE)
RUN = RunShape(seq_len=64, global_batch_size=8, stage_split="cost")
LLAMA_8B = ModelShape(4096, 32, 32, 8, 14_336, 128_256)
SCHEDULES = [("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zbv", 2)]


def rank_costs(layers, ranks, first, last):
    ends = {0: first, len(layers) - 1: last}
    return [sum(layers[stage] + ends.get(stage, 0) for stage in stages) for stages in ranks]


def test_head_of_llama_8b_costs_two_layers_and_the_last_rank_has_fewer():
    first, last = end_costs(LLAMA_8B, replace(RUN, seq_len=8192))
    assert first < 1e-4 and 2 < last < 2.2
    assert stage_layers(LLAMA_8B, 4, replace(RUN, seq_len=8192)) == (8, 9, 9, 6)
    assert stage_layers(LLAMA_8B, 4, replace(RUN, stage_split="even")) == (8, 8, 8, 8)


@pytest.mark.parametrize("recompute", [False, True])
def test_costs_of_ends_and_layers_are_the_operations_of_the_whole_model(recompute):
    _, last = end_costs(MODEL, replace(RUN, recompute=recompute))
    layer = 3 * 2.0 * 512 * 32 / last
    assert 12 * layer + last * layer == pytest.approx(
        token_flops(MODEL, 64, causal=True, recompute=recompute).hardware, rel=1e-12
    )


@given(
    st.integers(1, 60),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(SCHEDULES),
    st.floats(0, 4),
    st.floats(0, 12),
)
def test_no_layer_could_move_and_lower_the_slowest_rank(n_layers, pp, schedule, first, last):
    name, per_rank = schedule
    if n_layers < pp * per_rank:
        return
    ranks = tuple(stages_of_rank(name, pp, rank, per_rank) for rank in range(pp))
    layers = balanced(n_layers, ranks, first, last)
    assert sum(layers) == n_layers and min(layers) >= 1
    assert sorted(stage for stages in ranks for stage in stages) == list(range(pp * per_rank))
    costs = rank_costs(layers, ranks, first, last)
    movable = [cost for cost, stages in zip(costs, ranks, strict=True) if any(layers[stage] > 1 for stage in stages)]
    if movable:  # of what is above one layer a stage, the largest is within a layer of the least
        assert max(movable) <= min(costs) + 1 + 1e-6


@given(st.integers(1, 40), st.integers(1, 12))
def test_by_cost_without_ends_is_even(n_layers, pp):
    if n_layers >= pp:
        assert balanced(n_layers, tuple((rank,) for rank in range(pp)), 0.0, 0.0) == split_layers(n_layers, pp)


@pytest.mark.parametrize("split", ["cost", "even", (1, 2, 6, 3)])
def test_planner_counts_the_parameters_of_the_stages_that_the_model_is_cut_into(split):
    run = replace(RUN, stage_split=split)
    with torch.device("meta"):
        decoder = Decoder(DecoderArgs.of_plain(SHAPE))
    stages = decoder.split_layers(stage_layers(MODEL, 4, run))
    placed = positions(MODEL, Layout(pp=4), run)
    assert [len(stage.layers) for stage in stages] == [position.num_layers for position in placed]
    assert [name for stage in stages for name in stage.layers] == [str(layer) for layer in range(12)]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in decoder.named_parameters()), "names are those of the whole model"


STATED = {1: (5, 7), 2: (1, 2, 3, 6), 3: (1, 2, 4, 1, 2, 2)}


@pytest.mark.parametrize("schedule, per_rank", SCHEDULES)
def test_stated_layers_are_taken_as_they_are(schedule, per_rank):
    run = replace(RUN, schedule=schedule, stages_per_rank=per_rank, stage_split=STATED[per_rank])
    for each in positions(MODEL, Layout(pp=2), run):
        assert each.layers_by_stage == tuple(STATED[per_rank][stage] for stage in each.stages)


def _max_cost(model: ModelShape, run: RunShape, cut: tuple[int, ...], ranks: list[tuple[int, ...]]) -> float:
    """Of the costliest rank, each layer's products counted by itself."""
    first, last = end_costs(model, run)
    dense = dense_cost(model, run)
    costs = []
    start = 0
    for stage, length in enumerate(cut):
        layers = range(start, start + length)
        start += length
        ends = first * (stage == 0) + last * (stage == len(cut) - 1)
        costs.append(ends + sum(dense if layer < model.num_dense_layers else 1.0 for layer in layers))
    return max(sum(costs[stage] for stage in stages) for stages in ranks)


@pytest.mark.parametrize("ffn_dim", [64, 4096, 30_000])
@pytest.mark.parametrize("num_dense", [1, 3])
def test_stages_with_dense_layers_before_experts_are_the_cheapest_of_all(ffn_dim: int, num_dense: int) -> None:
    experts = {"num_experts": 8, "top_k": 2, "expert_ffn_dim": 512, "num_dense_layers": num_dense}
    model = ModelShape(dim=512, n_layers=9, n_heads=8, n_kv_heads=8, ffn_dim=ffn_dim, vocab_size=3000, **experts)
    run = replace(RUN, schedule="1f1b", stages_per_rank=1, stage_split="cost")
    for pp in (2, 3, 4):
        ranks = [(rank,) for rank in range(pp)]
        every = [cut for cut in product(range(1, 9), repeat=pp) if sum(cut) == 9]
        best = min(_max_cost(model, run, cut, ranks) for cut in every)
        found = _max_cost(model, run, stage_layers(model, pp, run), ranks)
        assert found == pytest.approx(best, rel=1e-6), (pp, stage_layers(model, pp, run))


def test_a_dense_layer_costs_what_its_products_take() -> None:
    """As wide as the experts that a token passes: a router's product is all the difference."""
    experts = {"num_experts": 8, "top_k": 2, "expert_ffn_dim": 512, "num_shared_experts": 1, "num_dense_layers": 2}
    model = ModelShape(dim=512, n_layers=9, n_heads=8, n_kv_heads=8, ffn_dim=1536, vocab_size=3000, **experts)
    products = 512 * 512 * 4 + 3 * 512 * 1536 + 2 * 512 * (RUN.seq_len + 1) / 2
    assert dense_cost(model, RUN) == pytest.approx(products / (products + 8 * 512), rel=1e-6)
