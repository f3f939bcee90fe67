"""Counts that papers print, to the printed digit."""

from __future__ import annotations

import math

import pytest

from phalanx.planner import ModelShape, count_parameters
from phalanx.planner.flops import token_flops, training_days
from phalanx.planner.gpus import GPUS, find_gpu
from phalanx.planner.shape import LatentAttention
from phalanx.planner.states import state_bytes

DEEPSEEK_V3 = ModelShape(
    dim=7168,
    n_layers=61,
    n_heads=128,
    n_kv_heads=128,
    ffn_dim=18_432,
    vocab_size=129_280,
    num_experts=256,
    top_k=8,
    expert_ffn_dim=2048,
    num_shared_experts=1,
    num_dense_layers=3,
    latent=LatentAttention(query_rank=1536, kv_rank=512, plain_dim=128, rotary_dim=64, value_dim=128),
)


def gpt(layers, dim, heads):
    return ModelShape(
        dim,
        layers,
        heads,
        heads,
        4 * dim,
        51_200,
        tie_embeddings=True,
        gated_ffn=False,
        biases=True,
        max_positions=2048,
    )


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_of_the_zero_papers_first_figure(zero, gigabytes):
    assert round(state_bytes(7.5e9, 64, zero).total / 1e9, 1) == gigabytes


@pytest.mark.parametrize(
    ("parameters", "zero", "gigabytes"),
    [(128e9, 1, 513), (128e9, 2, 257), (128e9, 3, 2), (1e12, 1, 4011), (1e12, 2, 2013), (1e12, 3, 15.6)],
)
def test_states_of_the_zero_papers_first_table(parameters, zero, gigabytes):
    # The table cuts digits off where the figure rounds.
    digits = 10 if isinstance(gigabytes, float) else 1
    assert math.floor(state_bytes(parameters, 1024, zero).total / 1e9 * digits) / digits == gigabytes


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        (gpt(36, 4096, 32), 7.5),
        (gpt(60, 10_240, 80), 76.1),
        (gpt(80, 12_288, 96), 145.6),
        (gpt(105, 20_480, 128), 529.6),
        (gpt(128, 25_600, 160), 1008.0),
    ],
)
def test_parameters_of_megatrons_table(shape, billions):
    assert round(count_parameters(shape).total / 1e9, 1) == billions


def test_operations_of_a_gpt_are_the_papers_equation_3():
    layers, dim, seq, vocab = 96, 12_288, 2048, 51_200
    flops = token_flops(gpt(layers, dim, 96), seq, causal=False, recompute=True)
    model = 72 * layers * dim**2 * (1 + seq / (6 * dim) + vocab / (12 * layers * dim))
    hardware = 96 * layers * dim**2 * (1 + seq / (6 * dim) + vocab / (16 * layers * dim))
    assert flops.model == pytest.approx(model, rel=1e-12) and flops.hardware == pytest.approx(hardware, rel=1e-12)


@pytest.mark.parametrize(
    ("parameters", "tokens", "gpus", "tflops", "days"), [(175e9, 300e9, 1024, 140, 34), (1008e9, 450e9, 3072, 163, 84)]
)
def test_days_of_training_are_those_printed(parameters, tokens, gpus, tflops, days):
    assert round(training_days(parameters, tokens, gpus, tflops * 1e12, recompute=True)) == days


def test_latent_attention_and_experts_give_the_printed_671_and_37_billion():
    counts = count_parameters(DEEPSEEK_V3)
    assert round(counts.total / 1e9) == 671
    # The paper counts the embedding out of what a token passes.
    assert round((counts.active - counts.embedding) / 1e9) == 37


def test_window_lowers_the_keys_of_its_layers_alone():
    model = ModelShape(64, 4, 4, 4, 128, 100, window=2, window_every=2)
    # Causal, 4 tokens: 1 + 2 + 3 + 4 keys, or 1 + 2 + 2 + 2 in a window of 2.
    assert model.mean_keys(4, causal=True) == (10 / 4 + 7 / 4) / 2
    assert model.mean_keys(4, causal=False) == (4 + 2) / 2


@pytest.mark.parametrize(
    ("written", "name"),
    [("H100-SXM-80GB", "H100-80"), ("a100-sxm-40gb", "A100-40"), ("A100", "A100-80"), ("GB200", "GB200-186")],
)
def test_gpu_is_found_by_the_names_that_people_write(written, name):
    assert find_gpu(written) is GPUS[name]
