"""Hugging Face's Llama and the decoder: the same logits from the same weights, names and configuration both ways."""

from __future__ import annotations

import pytest
import torch

from phalanx.core.errors import PhalanxError
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
        ("attention_bias", True),
        ("rope_parameters", {"rope_type": "llama3"}),
        ("head_dim", 16),
    ],
)
def test_config_from_hugging_face_of_what_the_decoder_cannot_compute_is_refused(key: str, value: object) -> None:
    config = config_to_hugging_face(ARGS, max_position_embeddings=128) | {key: value}
    with pytest.raises(PhalanxError, match=r"config\.json"):
        config_from_hugging_face(config)
