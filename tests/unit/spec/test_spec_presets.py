"""Presets against what their papers and public configurations say."""

from __future__ import annotations

import pytest
import torch
from spec_samples import sample

from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.planner import count_parameters
from phalanx.planner.job_search import model_shape
from phalanx.spec.presets import PRESETS

PUBLISHED = {
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


def job_of(preset: str):
    return sample(model={"preset": preset})


@pytest.mark.parametrize("preset", PUBLISHED)
def test_total_of_a_preset_is_the_published_one(preset: str) -> None:
    assert count_parameters(model_shape(job_of(preset))).total == PUBLISHED[preset]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_planner_counts_what_the_decoder_of_a_preset_has(preset: str) -> None:
    job = job_of(preset)
    with torch.device("meta"):
        decoder = Decoder(DecoderArgs.of(job.model.decoder))
    assert count_parameters(model_shape(job)).total == sum(each.numel() for each in decoder.parameters())


@pytest.mark.parametrize("preset, billions", [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22)])
def test_active_parameters_of_a_preset_are_the_published_ones(preset: str, billions: float) -> None:
    assert count_parameters(model_shape(job_of(preset))).active == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize(
    "twin, preset",
    [
        ("llama3-tiny", "llama3.1-8b"),
        ("qwen3-tiny", "qwen3-8b"),
        ("mixtral-tiny", "mixtral-8x7b"),
        ("qwen3-moe-tiny", "qwen3-30b-a3b"),
    ],
)
def test_a_tiny_twin_has_every_feature_of_its_model(twin: str, preset: str) -> None:
    tiny, whole = (job_of(name).model.decoder for name in (twin, preset))
    sizes = {"dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "norm_eps"}
    inner = {"original_max_position_embeddings", "num_experts", "top_k", "expert_ffn_dim"}
    assert _without(tiny.model_dump(), sizes, inner) == _without(whole.model_dump(), sizes, inner)
    assert (tiny.n_heads > tiny.n_kv_heads) and (whole.n_heads > whole.n_kv_heads)


def _without(values, names, inner):
    kept = {name: value for name, value in values.items() if name not in names}
    return {name: _without(value, inner, set()) if isinstance(value, dict) else value for name, value in kept.items()}
