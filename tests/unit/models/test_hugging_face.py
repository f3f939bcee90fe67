"""Hugging Face's Llama and the decoder: the same logits from the same weights, names and configuration both ways."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

from phalanx.core.errors import PhalanxError, Problems
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.models.hugging_face import (
    config_from_hugging_face,
    config_to_hugging_face,
    name_from_hugging_face,
    name_to_hugging_face,
)

ARGS = DecoderArgs(
    dim=64, n_layers=3, n_heads=8, n_kv_heads=2, ffn_dim=96, vocab_size=128, norm_eps=1e-6, rope_theta=50000.0
)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_transformers_llama_equal_the_decoders(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    args = DecoderArgs(
        dim=64, n_layers=2, n_heads=8, n_kv_heads=2, ffn_dim=96, vocab_size=128, rope_theta=50000.0, tie_embeddings=tied
    )
    torch.manual_seed(1)
    decoder = Decoder(args)
    config = transformers.LlamaConfig.from_dict(config_to_hugging_face(args, max_position_embeddings=64))
    theirs = transformers.LlamaForCausalLM(config).eval()
    state = {name_to_hugging_face(name): tensor for name, tensor in decoder.state_dict().items()}
    theirs.load_state_dict(state, strict=True)
    tokens = torch.randint(0, 128, (2, 48))
    positions = torch.arange(48).expand(2, -1)
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens, positions, None), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_names_go_there_and_back() -> None:
    names = [name for name, _ in Decoder(ARGS).named_parameters()]
    assert [name_from_hugging_face(name_to_hugging_face(name)) for name in names] == names


@pytest.mark.parametrize("name", ["layers.0.attention.bias", "embed.weight", "layers.0.moe.router.weight"])
def test_name_to_hugging_face_of_another_model_is_refused(name: str) -> None:
    with pytest.raises(PhalanxError, match="Llama"):
        name_to_hugging_face(name)


def test_config_goes_there_and_back() -> None:
    assert config_from_hugging_face(config_to_hugging_face(ARGS, max_position_embeddings=128)) == ARGS


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mistral"),
        ("model_type", None),
        ("attention_bias", True),
        ("mlp_bias", 1),
        ("rope_parameters", {"rope_type": "llama3"}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("head_dim", 16),
        ("hidden_size", 36),
        ("num_key_value_heads", 3),
    ],
)
def test_config_from_hugging_face_of_what_the_decoder_cannot_compute_is_refused(key: str, value: object) -> None:
    config = config_to_hugging_face(ARGS, max_position_embeddings=128) | {key: value}
    with pytest.raises(PhalanxError, match=r"config\.json"):
        config_from_hugging_face(config)


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
