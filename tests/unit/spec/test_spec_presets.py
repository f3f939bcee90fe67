"""Presets against what their papers and public configurations say."""

from __future__ import annotations

import pytest
import torch
from spec_samples import sample

from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.models.hugging_face import config_to_hugging_face
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
    "deepseek-v3": 671_026_404_352,
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
    trained = [each for each in decoder.parameters() if each.requires_grad]  # all but biases of the choice
    assert count_parameters(model_shape(job)).total == sum(each.numel() for each in trained)


def test_deepseek_v3_has_the_parameters_of_its_public_model() -> None:
    transformers = pytest.importorskip("transformers")
    shape = DecoderArgs.of(job_of("deepseek-v3").model.decoder)
    config = config_to_hugging_face(shape, max_position_embeddings=4096)
    usual = transformers.DeepseekV3Config()  # whose defaults are the public model's
    said = transformers.DeepseekV3Config.from_dict(config)
    names = {"rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings", "num_nextn_predict_layers"}
    names |= {"architectures", "dtype", "num_mtp_layers", "scoring_func", "topk_method", "moe_layer_freq"}
    there, here = usual.to_dict(), said.to_dict()
    assert {key for key in {**there, **here} if there.get(key) != here.get(key)} <= names
    with torch.device("meta"):
        theirs = transformers.DeepseekV3ForCausalLM(said)
    assert sum(each.numel() for each in theirs.parameters()) == PUBLISHED["deepseek-v3"]


@pytest.mark.parametrize(
    "preset, billions", [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("deepseek-v3", 37)]
)
def test_active_parameters_of_a_preset_are_the_published_ones(preset: str, billions: float) -> None:
    assert count_parameters(model_shape(job_of(preset))).active == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize(
    "twin, preset",
    [
        ("llama3-tiny", "llama3.1-8b"),
        ("qwen3-tiny", "qwen3-8b"),
        ("mixtral-tiny", "mixtral-8x7b"),
        ("qwen3-moe-tiny", "qwen3-30b-a3b"),
        ("deepseek-v3-tiny", "deepseek-v3"),
    ],
)
def test_a_tiny_twin_has_every_feature_of_its_model(twin: str, preset: str) -> None:
    tiny, whole = (job_of(name).model.decoder for name in (twin, preset))
    sizes = {"dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "norm_eps"}
    inner = {"original_max_position_embeddings", "num_experts", "top_k", "expert_ffn_dim"}
    inner |= {"num_groups", "top_groups", "first_k_dense"}
    inner |= {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
    assert _without(tiny.model_dump(), sizes, inner) == _without(whole.model_dump(), sizes, inner)
    has_groups = whole.mla is None
    assert (tiny.n_heads > tiny.n_kv_heads) == (whole.n_heads > whole.n_kv_heads) == has_groups
    for moe in (tiny.moe, whole.moe):
        assert moe is None or (moe.num_groups > 1) == (moe.first_k_dense > 0) == (not has_groups)


def _without(values, names, inner):
    kept = {name: value for name, value in values.items() if name not in names}
    return {name: _without(value, inner, set()) if isinstance(value, dict) else value for name, value in kept.items()}
