from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.planner import ModelShape, RunShape
from phalanx.planner.software import software
from phalanx.planner.stack_memory import largest_memory, layer_bytes_per_token, stack_memory
from phalanx.spec import Layout

OLD = software("megatron-lm", 2022)
NEW = software("megatron-core", 2025)


def gpt(layers, dim, heads):
    return ModelShape(dim, layers, heads, heads, 4 * dim, 51_200, gated_ffn=False, biases=True)


def run(**changes):
    return RunShape(
        **{
            "seq_len": 2048,
            "global_batch_size": 4,
            "zero": 0,
            "precision": "fp16",
            "sequence_parallel": False,
            **changes,
        }
    )


@pytest.mark.parametrize(("dim", "heads", "tp"), [(6144, 64, 8), (12_288, 96, 8), (20_480, 128, 8), (4096, 32, 1)])
def test_layer_is_the_papers_formula(dim, heads, tp):
    model, layout = gpt(1, dim, heads), Layout(tp=tp)

    def held(**changes):
        return layer_bytes_per_token(model, layout, run(**changes), OLD, dense=True)

    scores = 5 * heads * 2048 / (dim * tp)
    assert held() == pytest.approx(dim * (10 + 24 / tp + scores))
    assert held(sequence_parallel=True) == pytest.approx(dim / tp * 34 + dim * scores)
    assert held(sequence_parallel=True, recompute_attention=True) == pytest.approx(34 * dim / tp)


@pytest.mark.parametrize(
    ("layers", "dim", "heads", "pp", "changes", "gib"),
    [
        (48, 6144, 64, 1, {"local_batch_size": 4}, 59.25),
        (48, 6144, 64, 1, {"local_batch_size": 4, "sequence_parallel": True, "recompute_attention": True}, 9.5625),
    ],
)
def test_activations_of_the_papers_first_figure(layers, dim, heads, pp, changes, gib):
    model, shape = gpt(layers, dim, heads), run(**changes)
    per_token = layer_bytes_per_token(model, Layout(tp=8, pp=pp), shape, OLD, dense=True)
    assert per_token * layers * shape.seq_len * shape.local_batch_size / 2**30 == pytest.approx(gib, rel=1e-4)


def test_states_are_18_bytes_a_parameter_in_the_papers_first_figure():
    # 12 l d^2 parameters over 8 ranks, weights and gradients of 2 bytes each, 12 of Adam and here 2 more of gradients.
    held = largest_memory(gpt(48, 6144, 64), Layout(tp=8), run(precision="bf16"), OLD).states
    assert held.total / 2**30 == pytest.approx(45.5625, rel=0.15)


def test_zero_bubble_schedules_hold_as_much_as_1f1b_and_twice():
    model, layout = gpt(22, 2304, 24), Layout(pp=8)
    shape = run(seq_len=1024, local_batch_size=6, global_batch_size=144, zero=1)
    one, same, twice = (
        largest_memory(model, layout, replace(shape, schedule=name), OLD).activations_bytes
        for name in ("1f1b", "zb1p", "zb2p")
    )
    assert one == same and 1.7 < twice / one < 2


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_each_zero_stage_holds_less(zero):
    model, layout = gpt(16, 2048, 16), Layout(dp_shard=8)
    low, high = (largest_memory(model, layout, run(zero=stage), NEW).total_bytes for stage in (zero + 1, zero))
    assert low < high


def test_first_position_of_a_pipeline_holds_most_activations():
    held = stack_memory(gpt(16, 2048, 16), Layout(pp=4), run(global_batch_size=16), NEW)
    assert [each.pp_rank for each in held] == [0, 1, 2, 3]
    assert sorted(held, key=lambda each: -each.activations_bytes) == list(held)


def test_recompute_and_offload_hold_less():
    model, layout = gpt(16, 2048, 16), Layout(dp_shard=8)
    whole = largest_memory(model, layout, run(zero=1), NEW).total_bytes
    for less in ({"recompute": True}, {"recompute_share": 0.5}, {"offloaded": 1.0}):
        assert largest_memory(model, layout, run(zero=1, **less), NEW).total_bytes < whole
