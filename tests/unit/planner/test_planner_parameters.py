from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.planner import ModelShape, RunShape, count_parameters, positions, rank_parameters
from phalanx.planner.stage_split import split_layers
from phalanx.spec import Layout

LLAMA = {"n_kv_heads": 8, "vocab_size": 128_256}
LLAMA_8B = ModelShape(dim=4096, n_layers=32, n_heads=32, ffn_dim=14_336, **LLAMA)
LLAMA_70B = ModelShape(dim=8192, n_layers=80, n_heads=64, ffn_dim=28_672, **LLAMA)
LLAMA_405B = ModelShape(dim=16_384, n_layers=126, n_heads=128, ffn_dim=53_248, **LLAMA)
LLAMA_1B = ModelShape(dim=2048, n_layers=16, n_heads=32, ffn_dim=8192, tie_embeddings=True, **LLAMA)
GPT3 = ModelShape(dim=12_288, n_layers=96, n_heads=96, n_kv_heads=96, ffn_dim=32_768, vocab_size=51_200)
MIXTRAL = ModelShape(
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim=0,
    vocab_size=32_000,
    num_experts=8,
    top_k=2,
    expert_ffn_dim=14_336,
)


@pytest.mark.parametrize(
    "model, total",
    [
        (LLAMA_1B, 1_235_814_400),
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_70B, 70_553_706_496),
        (LLAMA_405B, 405_853_388_800),
        (MIXTRAL, 46_702_792_704),
        (GPT3, 2 * 51_200 * 12_288 + 96 * (4 * 12_288**2 + 3 * 12_288 * 32_768 + 2 * 12_288) + 12_288),
    ],
)
def test_total_of_a_known_model_is_the_published_one(model, total):
    assert count_parameters(model).total == total


def test_parts_of_a_small_model_are_those_counted_by_hand():
    counts = count_parameters(ModelShape(dim=8, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=20, vocab_size=10))
    assert (counts.embedding, counts.head, counts.norms) == (80, 80, 3 * 16 + 8)
    assert counts.attention == 3 * (64 + 32 + 32 + 64) and counts.ffn == 3 * 3 * 160
    assert counts.active == counts.total == 80 + 80 + 56 + 576 + 1440


def test_experts_count_once_in_total_and_top_k_times_in_active():
    counts = count_parameters(
        ModelShape(8, 3, 4, 2, 0, 10, num_experts=4, top_k=2, expert_ffn_dim=5, num_shared_experts=1)
    )
    assert (counts.experts, counts.active_experts) == (3 * 4 * 120, 3 * 2 * 120)
    assert counts.ffn == 3 * 120 and counts.router == 3 * 4 * 8
    assert counts.total - counts.active == 3 * 2 * 120
    assert count_parameters(MIXTRAL).active == 12_879_925_248


SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]


@given(
    pp=st.sampled_from([1, 2, 3, 4]),
    tp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2]),
    layers=st.integers(8, 30),
    schedule=st.sampled_from(SCHEDULES),
    experts=st.sampled_from([0, 4]),
    tie=st.booleans(),
)
def test_parts_of_all_ranks_sum_to_the_whole_model(pp, tp, ep, layers, schedule, experts, tie):
    moe = (
        {"ffn_dim": 0, "num_experts": experts, "top_k": 2, "expert_ffn_dim": 24, "num_shared_experts": 1}
        if experts
        else {"ffn_dim": 48}
    )
    model = ModelShape(dim=16, n_layers=layers, n_heads=8, n_kv_heads=4, vocab_size=64, tie_embeddings=tie, **moe)
    per_rank = 2 if schedule not in ("gpipe", "1f1b") else 1
    layout = Layout(pp=pp, tp=tp, ep=ep, dp_shard=2)
    held = [
        rank_parameters(model, layout, place.num_layers, is_first=place.is_first, is_last=place.is_last)
        for place in positions(model, layout, RunShape(128, 8, schedule=schedule, stages_per_rank=per_rank))
    ]
    whole = count_parameters(model)
    assert sum(rank.copied for rank in held) == (16 * 64 // tp if tie and pp > 1 else 0)
    assert sum((rank.split - rank.copied) * tp + rank.whole + rank.experts * tp * ep for rank in held) == whole.total
    assert sum(rank.whole for rank in held) == whole.norms + whole.router
    assert sum(rank.experts * tp * ep for rank in held) == whole.experts


@given(st.integers(1, 200), st.integers(1, 64))
def test_layers_are_split_evenly_over_stages_the_way_the_model_splits_them(layers, stages):
    from phalanx.models.protocol import split_evenly

    split = split_layers(layers, stages)
    assert sum(split) == layers and max(split) - min(split) <= 1
    if layers < stages:
        with pytest.raises(PhalanxError, match=f"at most {layers} stages"):
            split_evenly(layers, stages)
    else:
        assert split == tuple(map(len, split_evenly(layers, stages)))
