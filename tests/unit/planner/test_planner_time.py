from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.planner import ModelShape, RunShape
from phalanx.planner.calibration import Calibration
from phalanx.planner.compute import PRECISIONS, Chip
from phalanx.planner.flops import token_flops
from phalanx.planner.layer import Place, _context_traffic, _shapes, seen
from phalanx.planner.network import cluster
from phalanx.planner.shape import LatentAttention
from phalanx.planner.software import software, speed
from phalanx.planner.time import Configuration, step_time, tokens_per_s_per_gpu
from phalanx.spec import Layout

LLAMA_8B = ModelShape(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, vocab_size=128_256)
RUN = RunShape(seq_len=8192, global_batch_size=128, zero=1)
CONFIG = Configuration(LLAMA_8B, Layout(dp_shard=64), RUN, cluster("H100"), software())


def having(**changes):
    parts = {name: changes.pop(name) for name in ("model", "layout", "cluster", "software") if name in changes}
    return replace(CONFIG, **parts, run=replace(CONFIG.run, **changes))


def seconds(**changes):
    return step_time(having(**changes)).total_s


def test_parts_add_up_to_the_step():
    step = step_time(having(layout=Layout(pp=4, tp=2, cp=2, dp_shard=4)))
    *parts, micro_batches = astuple(step)
    assert step.total_s == pytest.approx(sum(parts)) and micro_batches == 32 and all(part >= 0 for part in parts)


def test_all_to_all_of_a_window_costs_less_than_gathering_it_as_more_ranks_share_it():
    long = {"layout": Layout(cp=8, dp_shard=8), "seq_len": 131_072, "global_batch_size": 64}
    wide = replace(LLAMA_8B, n_kv_heads=32)
    gathered, dealt = (step_time(having(model=wide, **long, cp_comm_type=kind)) for kind in ("all_gather", "a2a"))
    assert 0 < dealt.context_s < gathered.context_s


@pytest.mark.parametrize(
    "gpu", ["A100-80", "H100-80", "H200-141", "H800-80", "B200", "B300", "GB200", "GB300", "MI250X"]
)
def test_no_gpu_computes_faster_than_its_peak(gpu):
    where = cluster(gpu)
    step = step_time(replace(CONFIG, cluster=where), speeds={})
    flops = token_flops(LLAMA_8B, 8192, causal=True).model * 128 * 8192 / 64
    reached = flops / step.total_s / (where.gpu.bf16_tflops * 1e12)
    assert 0.25 < reached < where.gpu.sustained


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({}, {"recompute": True, "keeps_products": True}),
        ({"recompute": True, "keeps_products": True}, {"recompute": True}),
        ({"recompute": True, "recompute_every": 2}, {"recompute": True}),
        ({}, {"recompute_share": 0.1}),
        ({"precision": "fp8"}, {}),
        ({"precision": "fp8"}, {"precision": "fp8-rowwise"}),
        ({}, {"offloaded": 1.0}),
        ({"offloaded": 1.0}, {"cpu_offload": True}),
        ({"cpu_offload": True, "zero": 1}, {"cpu_offload": True, "zero": 3}),
        ({}, {"paging_bytes": 1 << 30}),
        ({"offloaded": 1.0}, {"paging_bytes": 1 << 30}),
        ({}, {"global_batch_size": 192}),
        ({"layout": Layout(tp=8, dp_shard=8)}, {"layout": Layout(tp=8, dp_shard=8), "sequence_parallel": False}),
        ({"software": software("torchtitan", 2025)}, {"software": software("megatron-lm", 2021)}),
        ({"cluster": cluster("H100")}, {"cluster": cluster("H100", network_gbps=1)}),
    ],
)
def test_what_does_more_takes_longer(better, worse):
    assert seconds(**better) < seconds(**worse)


@pytest.mark.parametrize("micro_batches", [8, 32])
def test_schedules_rank_as_their_bubbles(micro_batches):
    kept = {"layout": Layout(pp=8, dp_shard=8), "global_batch_size": 8 * micro_batches}
    bubbles = {
        name: step_time(having(**kept, schedule=name, stages_per_rank=stages)).bubble_s
        for name, stages in [("1f1b", 1), ("interleaved_1f1b", 4), ("zb1p", 1), ("zb2p", 1)]
    }
    assert bubbles["1f1b"] > bubbles["zb1p"] > bubbles["zb2p"] == 0
    assert bubbles["1f1b"] > bubbles["interleaved_1f1b"] > 0


def test_bubble_of_equal_stages_is_p_less_1_over_m():
    # A head of almost nothing, so that all stages take alike.
    model = replace(LLAMA_8B, vocab_size=8)
    step = step_time(having(model=model, layout=Layout(pp=8, dp_shard=8), global_batch_size=8 * 32))
    work = step.compute_s + step.tensor_s + step.pipeline_send_s
    assert step.bubble_s / work == pytest.approx(7 / 32, rel=1e-2)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1))
def test_traffic_beside_computation_is_seen_in_part(traffic, compute, exposed):
    found = seen(traffic, compute, exposed)
    assert exposed * traffic <= found <= traffic + 1e-12
    assert found >= traffic - compute - 1e-12


@given(st.sampled_from([name for name in Calibration.__slots__ if name.endswith("share") or name.startswith("flash")]))
def test_higher_share_is_never_slower(name):
    config = having(precision="fp8", layout=Layout(tp=2, dp_shard=32), software=software("torchtitan", 2024))
    low, high = (replace(Calibration(), **{name: value}) for value in (0.4, 0.9))
    assert step_time(config, high).total_s <= step_time(config, low).total_s


def test_speed_is_of_the_nearest_year_and_else_1():
    speeds = {("H100", "some", 2023): 0.8, ("H100", "some", 2026): 1.1, ("A100", "some", 2025): 0.5}
    assert speed("H100", software("some", 2024), speeds) == 0.8
    assert speed("H100", software("some", 2030), speeds) == 1.1
    assert speed("H100", software("other", 2024), speeds) == speed("B200", software("some", 2024), speeds) == 1.0


def test_unknown_stack_is_what_was_usual_in_its_year():
    assert software("unheard-of", 2021).attention == "unfused" and not software("unheard-of", 2021).overlaps_data
    assert software(None, None).attention == "newest" and software("unheard-of", 2030).overlaps_data


def test_tokens_a_second_follow_from_the_step():
    step = step_time(CONFIG)
    assert tokens_per_s_per_gpu(CONFIG, step) == pytest.approx(128 * 8192 / 64 / step.total_s)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"precision": "int3"}, "bf16"),
        ({"precision": "nvfp4"}, "H100-80"),
        ({"layout": Layout(tp=3)}, "divisor of 32 heads"),
        ({"layout": Layout(pp=64)}, "one stage for each of 32 layers"),
        ({"seq_len": 0}, "at least 1"),
    ],
)
def test_impossible_configuration_is_refused_in_one_line(changes, key):
    with pytest.raises(PhalanxError, match=key) as refused:
        seconds(**changes)
    assert "\n" not in str(refused.value)


def test_less_between_replicas_costs_less_time_on_a_slow_network():
    where = cluster("H100", network_gbps=0.125)
    layout = Layout(dp_replicate=8, dp_shard=8)
    found = {
        name: step_time(replace(having(layout=layout, **keys), cluster=where)).data_s
        for name, keys in {
            "plain": {},
            "signs": {"compression": "onebit_adam"},
            "hidden": {"compression": "powersgd", "compression_rank": 4},
            "matrices": {"compression": "powersgd", "compression_rank": 4, "compresses_ends": True},
            "local": {"local_steps": 100},
            "rounds": {"local_steps": 200},
        }.items()
    }
    assert found["plain"] > 5 * max(found["signs"], found["matrices"], found["local"])
    assert found["matrices"] < found["hidden"] < found["plain"], "the ends are sent as they are"
    assert found["rounds"] < found["local"]
    within = step_time(replace(having(layout=Layout(dp_shard=8), compression="onebit_adam"), cluster=where)).data_s
    assert found["signs"] > within > 0


CHIP = Chip(CONFIG.cluster.gpu, CONFIG.software, PRECISIONS["bf16"])
LATENT = LatentAttention(query_rank=1536, kv_rank=512, plain_dim=128, rotary_dim=64, value_dim=128)


def test_gathering_latents_costs_what_their_width_is_of_that_of_keys_and_values():
    """All of it seen: on ranks that compute nothing beside it the network's share of the time is its bytes'."""
    layout = Layout(cp=8, dp_shard=8)
    shape = {"n_heads": 128, "n_kv_heads": 128, "head_width": 192}
    times = []
    for model in (replace(LLAMA_8B, **shape), replace(LLAMA_8B, **shape, latent=LATENT)):
        place = Place(model, layout, replace(RUN, seq_len=16_384), CONFIG.cluster, CHIP)
        times.append(_context_traffic(place, 0.0))
    assert times[1] < times[0] / 30, "576 elements a token, not 49,152"
    dealt = replace(RUN, seq_len=16_384, cp_comm_type="a2a")
    place = Place(replace(LLAMA_8B, **shape, latent=LATENT), layout, dealt, CONFIG.cluster, CHIP)
    assert _context_traffic(place, 0.0) > times[1], "heads are wider than latents"


def test_keys_and_values_of_the_window_are_made_from_latents_on_every_rank_that_gathers_them():
    model = replace(LLAMA_8B, n_heads=128, n_kv_heads=128, head_width=192, latent=LATENT)
    rows = {}
    for kind in ("all_gather", "a2a"):
        run = replace(RUN, seq_len=16_384, cp_comm_type=kind)
        place = Place(model, Layout(cp=8, dp_shard=8, tp=2), run, CONFIG.cluster, CHIP)
        (wide,) = [each for each in _shapes(place, dense=True) if each[3] == 512]
        rows[kind] = wide[1]
        assert wide[2] == 128 * 256 / 2
    assert rows == {"all_gather": 16_384, "a2a": 2048}
