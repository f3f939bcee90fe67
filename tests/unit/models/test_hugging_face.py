"""Hugging Face's Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE and DeepSeek-V3 and the decoder: the same logits from the same
weights, names and configuration both ways.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.core.errors import PhalanxError, Problems
from phalanx.models.args import DecoderArgs, MlaShape, MoeShape, RopeScaling
from phalanx.models.decoder import Decoder
from phalanx.models.experts import stored_names
from phalanx.models.hugging_face import (
    config_from_hugging_face,
    config_to_hugging_face,
    name_from_hugging_face,
    name_to_hugging_face,
)
from phalanx.models.rotary import rotary_frequencies

ARGS = DecoderArgs(
    dim=64, n_layers=3, n_heads=8, n_kv_heads=2, ffn_dim=96, vocab_size=128, norm_eps=1e-6, rope_theta=50000.0
)


SMALL = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 2,
    "ffn_dim": 96,
    "vocab_size": 128,
    "rope_theta": 50000.0,
}
# Windows of 48 tokens where the original ones had 16: every part of a scaling acts.
LLAMA3 = RopeScaling("llama3", 8.0, 16, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeScaling("yarn", 4.0, 16, beta_fast=2.0)
DEEPSEEK = {
    "n_kv_heads": 8,
    "mla": MlaShape(kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=24),
    "moe": MoeShape(
        8, 3, 24, 1, "sigmoid", route_scale=2.5, num_groups=4, top_groups=2, selection_bias=True, first_k_dense=1
    ),
}
VARIANTS = {
    "llama": {},
    "llama tied": {"tie_embeddings": True},
    "llama with heads of its own": {"head_dim": 20},
    "llama scaled linearly": {"rope_scaling": RopeScaling("linear", 3.0)},
    "llama 3.1": {"rope_scaling": LLAMA3},
    "llama with yarn": {"rope_scaling": YARN},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "head_dim": 16, "norm_eps": 1e-6},
    "qwen3 tied": {"qk_norm": True, "head_dim": 16, "tie_embeddings": True},
    "qwen3 with yarn": {"qk_norm": True, "head_dim": 16, "rope_scaling": YARN},
    "mixtral": {"ffn_dim": 0, "moe": MoeShape(8, 2, 40)},
    "mixtral tied with yarn": {"ffn_dim": 0, "moe": MoeShape(4, 1, 40), "tie_embeddings": True, "rope_scaling": YARN},
    "qwen3-moe": {"qk_norm": True, "head_dim": 16, "ffn_dim": 0, "moe": MoeShape(16, 4, 24)},
    "qwen3-moe not normalised": {
        "qk_norm": True,
        "head_dim": 16,
        "ffn_dim": 0,
        "moe": MoeShape(8, 3, 24, normalise=False),
    },
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3 with queries from the input": {**DEEPSEEK, "mla": MlaShape(16, 12, 8, 10)},
    "deepseek-v3 with yarn": {**DEEPSEEK, "rope_scaling": RopeScaling("yarn", 4.0, 16, mscale=1.0, mscale_all_dim=1.0)},
    "deepseek-v3 with yarn of two magnitudes": {
        **DEEPSEEK,
        "rope_scaling": RopeScaling("yarn", 4.0, 16, mscale=0.8, mscale_all_dim=1.3),
    },
    "deepseek-v3 with yarn without magnitudes, tied": {**DEEPSEEK, "rope_scaling": YARN, "tie_embeddings": True},
    "deepseek-v3 without groups and dense layers": {
        **DEEPSEEK,
        "ffn_dim": 0,
        "moe": MoeShape(6, 2, 24, 2, "sigmoid", False, 1.5, selection_bias=True),
    },
}
LENGTH = 48


def _filled(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter drawn at random: a norm of ones or a bias of zeros would prove nothing."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            is_vector = parameter.dim() == 1
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * (0.3 if is_vector else 0.08) + is_vector)
    return model.eval()


def _assert_same_logits(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    tokens = torch.randint(0, 128, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = ours(tokens, torch.arange(LENGTH).expand(2, -1), None)
        torch.testing.assert_close(found, theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def _opened(transformers: Any, config: dict[str, Any], state: dict[str, torch.Tensor], folder: Path) -> Any:
    """What transformers makes of a folder; every tensor must be taken, and none be missing."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model.eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_an_exported_decoder_equal_transformers(variant: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    args = DecoderArgs(**SMALL | VARIANTS[variant])
    decoder = _filled(Decoder(args))
    config = config_to_hugging_face(args, max_position_embeddings=LENGTH)
    state = decoder.state_dict()
    if args.tie_embeddings:
        del state["output.weight"]
    state = {name_to_hugging_face(name, config["model_type"]): tensor for name, tensor in state.items()}
    theirs = _opened(transformers, config, state, tmp_path)
    assert [type(theirs).__name__] == config["architectures"]
    _assert_same_logits(decoder, theirs)
    assert config_from_hugging_face(config) == args


THEIRS = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
SCALED = {"rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 16}
FOREIGN = {
    "llama": ("LlamaConfig", {}, {"rope_type": "default", "rope_theta": 1e4}),
    "llama 3.1": (
        "LlamaConfig",
        {"head_dim": 12, "rms_norm_eps": 1e-5},
        {**SCALED, "rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4},
    ),
    "qwen2": ("Qwen2Config", {}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}, {"rope_type": "default", "rope_theta": 1e6}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, {"rope_type": "default", "rope_theta": 1e6}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
        {"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3 tied with yarn": (
        "Qwen3Config",
        {"head_dim": 24, "tie_word_embeddings": True},
        {**SCALED, "rope_type": "yarn"},
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_logits_of_an_imported_model_of_transformers_equal_its_own(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kind, more, rope = FOREIGN[name]
    config = getattr(transformers, kind)(**THEIRS, **more, rope_parameters=dict(rope))
    theirs = _filled(transformers.AutoModelForCausalLM.from_config(config))
    said = config.to_dict()
    args = config_from_hugging_face(said)
    decoder = Decoder(args)
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    weights = {name_from_hugging_face(name): tensor for name, tensor in stored.items()}
    if args.tie_embeddings:
        weights["output.weight"] = weights["tok_embeddings.weight"]
    decoder.load_state_dict(weights)
    _assert_same_logits(decoder, theirs)
    older = {key: value for key, value in said.items() if key != "rope_parameters"}
    older["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    older["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    assert config_from_hugging_face(older) == args, "as transformers 4 writes it"
    if older["rope_scaling"]:
        older["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
        assert config_from_hugging_face(older) == args, "as its first versions wrote it"


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("linear", 3.0),
        RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        RopeScaling("llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        RopeScaling("yarn", 4.0, 32768),
    ],
)
def test_frequencies_of_a_published_size_equal_those_of_transformers_to_the_last_bit(scaling: RopeScaling) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    args = DecoderArgs(**SMALL | {"head_dim": 128, "rope_theta": 500000.0, "rope_scaling": scaling})
    config = LlamaConfig.from_dict(config_to_hugging_face(args, max_position_embeddings=131072))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling.type](config, "cpu")
    assert torch.equal(rotary_frequencies(args, "cpu"), expected)
    assert (scaling.attention_factor or 1.0) == attention_factor


def test_names_go_there_and_back() -> None:
    args = dataclasses.replace(ARGS, qk_norm=True, qkv_bias=True)
    names = [name for name, _ in Decoder(args).named_parameters()]
    assert [name_from_hugging_face(name_to_hugging_face(name)) for name in names] == names


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_names_of_experts_go_there_and_back(model_type: str) -> None:
    decoder = Decoder(dataclasses.replace(ARGS, ffn_dim=0, moe=MoeShape(4, 2, 8)))
    names = list(stored_names(decoder))
    assert names == list(decoder.state_dict()) and "layers.2.feed_forward.experts.3.w2.weight" in names
    assert [name_from_hugging_face(name_to_hugging_face(name, model_type)) for name in names] == names


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.0.w1.weight", "model.layers.0.moe.gate.weight"])
def test_names_of_experts_of_another_family_are_refused(name: str) -> None:
    with pytest.raises(PhalanxError, match="Mixtral"):
        name_from_hugging_face(name)


@pytest.mark.parametrize(
    ("qk_norm", "key", "value", "told"),
    [
        (False, "sliding_window", 4096, "sliding_window is 4096: expected None: every token sees all"),
        (False, "num_local_experts", 0, "num_local_experts is 0: expected a whole number above 0"),
        (False, "num_experts_per_tok", 9, r"num_experts_per_tok is 9: expected at most num_local_experts \(4\)"),
        (False, "intermediate_size", None, "intermediate_size: expected a whole number"),
        (True, "num_experts", "x", "num_experts is 'x': expected a whole number above 0"),
        (True, "norm_topk_prob", 1, "norm_topk_prob is 1: expected true or false"),
        (True, "mlp_only_layers", [0], r"mlp_only_layers is \[0\]: expected \[\]: every layer has experts"),
        (True, "decoder_sparse_step", 2, "decoder_sparse_step is 2: expected 1: every layer has experts"),
        (True, "moe_intermediate_size", None, "moe_intermediate_size: expected a whole number"),
    ],
)
def test_experts_that_the_decoder_cannot_compute_are_refused(qk_norm: bool, key: str, value: object, told: str) -> None:
    args = dataclasses.replace(ARGS, ffn_dim=0, moe=MoeShape(4, 2, 8), qk_norm=qk_norm)
    config = config_to_hugging_face(args, max_position_embeddings=128)
    assert config_from_hugging_face(config) == args
    with pytest.raises(Problems, match=rf"^config\.json {told}"):
        config_from_hugging_face(config | {key: value})


@pytest.mark.parametrize(
    ("more", "moe", "told"),
    [
        ({}, {"normalise": False}, "moe.normalise is False: expected true, as Mixtral"),
        ({}, {"score": "sigmoid"}, "moe.score is 'sigmoid': expected softmax"),
        ({"qk_norm": True}, {"num_shared_experts": 1}, "moe.num_shared_experts is 1: expected 0"),
        ({"qk_norm": True}, {"selection_bias": True}, "moe.selection_bias is True: expected false"),
        ({"qkv_bias": True}, {}, "qkv_bias is True: expected false"),
    ],
)
def test_export_of_experts_that_no_model_of_transformers_has_is_refused(
    more: dict[str, Any], moe: dict[str, Any], told: str
) -> None:
    args = dataclasses.replace(ARGS, ffn_dim=0, moe=MoeShape(4, 2, 8, **moe), **more)
    with pytest.raises(PhalanxError, match=rf"^\[model\.args\] {told}"):
        config_to_hugging_face(args, max_position_embeddings=128)


@pytest.mark.parametrize(
    "name", ["layers.0.attention.bias", "embed.weight", "layers.0.moe.router.weight", "layers.0.attention.wo.bias"]
)
def test_name_to_hugging_face_of_another_model_is_refused(name: str) -> None:
    with pytest.raises(PhalanxError, match="Llama"):
        name_to_hugging_face(name)


def test_config_goes_there_and_back() -> None:
    assert config_from_hugging_face(config_to_hugging_face(ARGS, max_position_embeddings=128)) == ARGS


YARN_TABLE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("model_type", "mistral", "model_type is 'mistral': expected one of llama, qwen2, qwen3"),
        ("model_type", None, "model_type: expected one of"),
        ("attention_bias", True, "attention_bias is True: expected False: the output of attention has no bias"),
        ("mlp_bias", 1, "mlp_bias is 1: expected False: the feed-forward"),
        ("quantization_config", {"bits": 4}, "quantization_config is .*: expected null: weights are trained"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5: expected 1: every pair"),
        ("layer_types", ["full_attention", "sliding_attention"], "layer_types is 'sliding_attention': expected full"),
        ("original_max_position_embeddings", 64, "original_max_position_embeddings is 64: expected null"),
        ("rope_parameters", {"rope_type": "llama3"}, "rope_parameters.factor: expected a number of at least 1"),
        ("rope_parameters", {"partial_rotary_factor": 0.25}, "rope_parameters.partial_rotary_factor is 0.25"),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}, "rope_parameters.full_attention is"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_parameters is .*: expected the same as rope_scaling"),
        (
            "rope_scaling",
            {"rope_type": "dynamic", "factor": 2.0},
            "rope_scaling.rope_type is 'dynamic': expected one of",
        ),
        ("rope_scaling", {**YARN_TABLE, "mscale": 1.0}, "rope_scaling.mscale is 1.0: expected null"),
        ("rope_scaling", {**YARN_TABLE, "truncate": False}, "rope_scaling.truncate is False: expected null"),
        ("rope_scaling", {**YARN_TABLE, "factor": 0.5}, "rope_scaling.factor is 0.5: expected a number of at least 1"),
        ("rope_scaling", {**YARN_TABLE, "beta_fast": 1}, "rope_scaling.beta_fast is 1: expected more than beta_slow"),
        ("head_dim", 15, "head_dim is 15: expected an even width"),
        ("hidden_size", 36, "hidden_size is 36: expected a multiple of num_attention_heads"),
        ("num_key_value_heads", 3, "num_key_value_heads is 3: expected a divisor of num_attention_heads"),
    ],
)
def test_config_from_hugging_face_of_what_the_decoder_cannot_compute_is_refused(
    key: str, value: object, told: str
) -> None:
    config = config_to_hugging_face(ARGS, max_position_embeddings=128) | {key: value}
    with pytest.raises(PhalanxError, match=rf"^config\.json {told}"):
        config_from_hugging_face(config)


def test_sliding_windows_of_qwen_are_refused() -> None:
    args = dataclasses.replace(ARGS, qk_norm=True)
    config = config_to_hugging_face(args, max_position_embeddings=128) | {"sliding_window": 4096}
    assert config_from_hugging_face(config) == args, "one that is not used"
    with pytest.raises(Problems, match=r"use_sliding_window is True: expected False: every token sees all earlier"):
        config_from_hugging_face(config | {"use_sliding_window": True})


def test_heads_that_a_config_of_qwen3_leaves_out_are_those_of_transformers() -> None:
    args = dataclasses.replace(ARGS, qk_norm=True, n_heads=32, n_kv_heads=32, head_dim=128)
    config = config_to_hugging_face(args, max_position_embeddings=128)
    del config["head_dim"], config["num_key_value_heads"]
    assert config_from_hugging_face(config) == args


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"qk_norm": True, "qkv_bias": True}, r"\[model\.args\] qkv_bias is True: expected false beside qk_norm"),
        ({"dim": 60, "head_dim": 8}, r"\[model\.args\] dim is 60: expected a multiple of n_heads \(8\)"),
    ],
)
def test_export_of_a_shape_that_no_model_of_transformers_has_is_refused(more: dict[str, Any], told: str) -> None:
    with pytest.raises(PhalanxError, match=told):
        config_to_hugging_face(dataclasses.replace(ARGS, **more), max_position_embeddings=128)


def test_a_decoder_scaled_by_yarn_says_the_window_that_it_is_scaled_to() -> None:
    args = dataclasses.replace(ARGS, rope_scaling=RopeScaling("yarn", 4.0, 32))
    config = config_to_hugging_face(args, max_position_embeddings=64)
    assert config["max_position_embeddings"] == 128, "transformers 4 takes the factor from it"


@pytest.mark.parametrize("wrong", ["x", "", True, 0, -4, 16.0, [], {}, 10**400, math.nan])
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"]
)
def test_config_from_hugging_face_names_a_size_that_is_none(key: str, wrong: object) -> None:
    config = config_to_hugging_face(ARGS, max_position_embeddings=128) | {key: wrong}
    with pytest.raises(Problems, match=rf"^there/config\.json {key} is .*: expected a whole number above 0; copy"):
        config_from_hugging_face(config, "there/config.json")


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "rope_parameters.rope_theta"])
@pytest.mark.parametrize("wrong", ["x", True, 0, -1.0, math.inf, math.nan, 10**400, []])
def test_config_from_hugging_face_names_a_number_that_is_none(key: str, wrong: object) -> None:
    table, _, inner = key.partition(".")
    config = config_to_hugging_face(ARGS, max_position_embeddings=128) | {table: {inner: wrong} if inner else wrong}
    with pytest.raises(Problems, match=rf"^config\.json {re.escape(key)} is .*: expected a number above 0; copy"):
        config_from_hugging_face(config)


def test_config_from_hugging_face_lists_all_mistakes_at_once() -> None:
    """What is missing, what is no value of its key and what the decoder can't compute, each in one line."""
    config = config_to_hugging_face(ARGS, max_position_embeddings=128)
    del config["vocab_size"], config["num_hidden_layers"]
    config |= {"num_attention_heads": "4", "tie_word_embeddings": "yes", "rope_scaling": "none", "hidden_act": "gelu"}
    with pytest.raises(Problems) as caught:
        config_from_hugging_face(config)
    named = {
        line.removeprefix("config.json ").split(":")[0].split(" is ")[0] for line in str(caught.value).splitlines()
    }
    wrong = {"vocab_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings", "rope_scaling"}
    assert named == {*wrong, "hidden_act"}


def test_config_from_hugging_face_fills_in_what_transformers_does() -> None:
    config = config_to_hugging_face(ARGS, max_position_embeddings=128)
    for key in (
        "num_key_value_heads",
        "tie_word_embeddings",
        "rope_theta",
        "rope_parameters",
        "head_dim",
        "hidden_act",
    ):
        config[key] = None
    expected = dataclasses.replace(ARGS, n_kv_heads=ARGS.n_heads, tie_embeddings=False, rope_theta=10000.0)
    assert config_from_hugging_face(config) == expected


@pytest.mark.parametrize("config", [[], "x", None, 3])
def test_config_from_hugging_face_of_what_is_no_object_is_refused(config: object) -> None:
    with pytest.raises(PhalanxError, match="expected a JSON object"):
        config_from_hugging_face(config)


DEEPSEEK_ARGS = DecoderArgs(**SMALL | VARIANTS["deepseek-v3 with yarn"])


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("rope_interleave", False, "rope_interleave is False: expected True"),
        ("scoring_func", "softmax", "scoring_func is 'softmax': expected 'sigmoid'"),
        ("topk_method", "greedy", "topk_method is 'greedy': expected 'noaux_tc'"),
        ("moe_layer_freq", 2, "moe_layer_freq is 2: expected 1"),
        ("attention_bias", True, "attention_bias is True: expected False"),
        ("num_key_value_heads", 4, r"num_key_value_heads is 4: expected num_attention_heads \(8\)"),
        ("first_k_dense_replace", 2, r"first_k_dense_replace is 2: expected less than num_hidden_layers \(2\)"),
        ("first_k_dense_replace", -1, "first_k_dense_replace is -1: expected a whole number"),
        ("qk_rope_head_dim", 7, "qk_rope_head_dim is 7: expected an even width"),
        ("n_group", 3, "n_group is 3: expected groups of the 8 experts"),
        ("n_group", 8, "n_group is 8: expected groups of the 8 experts, of two at least"),
        ("topk_group", 5, r"topk_group is 5: expected at most n_group \(4\)"),
        ("num_experts_per_tok", 5, "num_experts_per_tok is 5: expected at most the 4 experts"),
        ("q_lora_rank", 0, "q_lora_rank is 0: expected a whole number above 0"),
        ("n_shared_experts", 0, "n_shared_experts is 0: expected a whole number above 0"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config is .*: expected null"),
    ],
)
def test_what_a_deepseek_config_says_otherwise_is_named(key: str, value: object, told: str) -> None:
    config = config_to_hugging_face(DEEPSEEK_ARGS, max_position_embeddings=LENGTH)
    with pytest.raises(PhalanxError, match=told):
        config_from_hugging_face({**config, key: value})


def test_a_deepseek_config_that_says_little_is_the_public_model() -> None:
    from phalanx.spec.presets import PRESETS

    sizes = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129_280}
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    said = {"model_type": "deepseek_v3", **sizes, "intermediate_size": 18_432, "rms_norm_eps": 1e-6}
    found = config_from_hugging_face({**said, "rope_scaling": yarn, "num_nextn_predict_layers": 1})
    preset = DecoderArgs.of_plain(PRESETS["deepseek-v3"])
    assert preset.moe is not None
    assert found == dataclasses.replace(preset, moe=dataclasses.replace(preset.moe, aux_loss=0.0))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"moe": None}, "moe: expected a table"),
        ({"moe": {"score": "softmax"}}, "moe.score is 'softmax': expected sigmoid"),
        ({"moe": {"selection_bias": False}}, "moe.selection_bias is False: expected true"),
        ({"moe": {"num_shared_experts": 0}}, "moe.num_shared_experts is 0: expected at least 1"),
        ({"moe": {"num_groups": 8}}, "moe.num_groups is 8: expected groups of at least two experts"),
    ],
)
def test_a_shape_that_deepseek_of_transformers_does_not_have_is_refused(change: dict[str, Any], told: str) -> None:
    moe = change["moe"] and dataclasses.replace(DEEPSEEK["moe"], **change["moe"])
    args = DecoderArgs(**SMALL | DEEPSEEK | {"moe": moe})
    with pytest.raises(PhalanxError, match=rf"\[model.args\] {told}"):
        config_to_hugging_face(args, max_position_embeddings=LENGTH)


def test_magnitudes_of_yarn_belong_to_deepseek_alone() -> None:
    plain = config_to_hugging_face(DecoderArgs(**SMALL | VARIANTS["llama with yarn"]), max_position_embeddings=LENGTH)
    scaled = {**plain["rope_scaling"], "mscale": 1.0}
    with pytest.raises(PhalanxError, match=r"rope_scaling.mscale is 1.0: expected null"):
        config_from_hugging_face({**plain, "rope_scaling": scaled, "rope_parameters": scaled})
    ours = config_to_hugging_face(DEEPSEEK_ARGS, max_position_embeddings=LENGTH)
    alone = {key: value for key, value in ours["rope_scaling"].items() if key != "mscale_all_dim"}
    with pytest.raises(PhalanxError, match=r"rope_scaling.mscale is 1.0: expected mscale and mscale_all_dim together"):
        config_from_hugging_face({**ours, "rope_scaling": alone, "rope_parameters": None})
