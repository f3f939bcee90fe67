"""The decoder against what it must not know: later tokens, other documents, where a window starts, how it is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs, MoeShape
from phalanx.models.decoder import Decoder
from phalanx.models.protocol import HasTiedStages, Initial, split_evenly

ARGS = DecoderArgs(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=64)
LENGTH = 16


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(ARGS)


def _inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, ARGS.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.arange(LENGTH).expand(2, -1), torch.zeros_like(tokens)


def test_logits_when_a_later_token_changes_stay_the_same_before_it(decoder: Decoder) -> None:
    tokens, positions, documents = _inputs()
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % ARGS.vocab_size
    before, after = decoder(tokens, positions, documents), decoder(changed, positions, documents)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("attn_backend", ["sdpa", "varlen"])
def test_logits_of_a_document_equal_those_of_the_document_alone(attn_backend: str) -> None:
    torch.manual_seed(0)
    decoder = Decoder(ARGS, attn_backend)
    tokens, positions, documents = _inputs()
    documents, positions = documents.clone(), positions.clone()
    documents[:, 6:], positions[:, 6:] = 1, torch.arange(LENGTH - 6)
    packed = decoder(tokens, positions, documents)
    alone = decoder(tokens[:, 6:], positions[:, 6:], documents[:, 6:])
    torch.testing.assert_close(packed[:, 6:], alone, rtol=1e-5, atol=1e-6)


def test_logits_without_document_ids_equal_those_of_one_document(decoder: Decoder) -> None:
    tokens, positions, documents = _inputs()
    torch.testing.assert_close(
        decoder(tokens, positions, None), decoder(tokens, positions, documents), rtol=1e-5, atol=1e-6
    )


def test_logits_when_all_positions_move_stay_the_same(decoder: Decoder) -> None:
    tokens, positions, documents = _inputs()
    torch.testing.assert_close(
        decoder(tokens, positions, documents), decoder(tokens, positions + 100, documents), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_in_a_row_give_the_logits_and_the_names_of_the_whole(decoder: Decoder, num_stages: int) -> None:
    tokens, positions, documents = _inputs()
    stages = decoder.split_stages(num_stages)
    hidden = tokens
    for stage in stages:
        hidden = stage(hidden, positions, documents)
    assert torch.equal(hidden, decoder(tokens, positions, documents))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in decoder.named_parameters())


def test_split_stages_with_more_stages_than_layers_names_the_limit(decoder: Decoder) -> None:
    with pytest.raises(PhalanxError, match=r"at most n_layers \(4\)"):
        decoder.split_stages(5)


def test_split_stages_with_tied_embeddings_gives_the_last_one_a_copy_of_its_own() -> None:
    tied = Decoder(
        DecoderArgs(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=64, tie_embeddings=True)
    )
    assert tied.output is not None and tied.tok_embeddings is not None
    assert tied.output.weight is tied.tok_embeddings.weight
    first, last = tied.split_stages(2)
    assert isinstance(first, Decoder) and isinstance(last, Decoder) and isinstance(last, HasTiedStages)
    assert last.tied == {"output.weight": "tok_embeddings.weight"} and not first.tied and not tied.tied
    assert last.get_parameter("output.weight") is not tied.tok_embeddings.weight
    assert first.get_parameter("tok_embeddings.weight") is tied.tok_embeddings.weight
    (whole,) = tied.split_stages(1)
    assert isinstance(whole, Decoder) and not whole.tied, "one stage needs no copy"
    names = [name for stage in (first, last) for name, _ in stage.named_parameters() if name not in stage.tied]
    assert sorted(names) == sorted(name for name, _ in tied.named_parameters())


@pytest.mark.parametrize(("dim", "kv", "head_dim"), [(30, 2, 0), (32, 3, 0), (32, 2, 9), (30, 2, 9)])
def test_decoder_args_that_do_not_divide_are_refused(dim: int, kv: int, head_dim: int) -> None:
    with pytest.raises(PhalanxError):
        DecoderArgs(dim=dim, n_layers=1, n_heads=4, n_kv_heads=kv, ffn_dim=8, vocab_size=8, head_dim=head_dim)


def test_args_of_a_record_from_before_their_keys_have_the_defaults() -> None:
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta")
    older = {name: getattr(ARGS, name) for name in names} | {"tie_embeddings": False, "dropout": 0.0, "moe": None}
    assert DecoderArgs.of_plain(older) == ARGS and ARGS.head_dim == 8


def test_heads_of_their_own_width_are_normalised_whatever_the_size_of_their_weights() -> None:
    """The weights of queries and keys, and their biases, times any number give the same logits."""
    args = dataclasses.replace(ARGS, head_dim=12, qk_norm=True, qkv_bias=True, norm_eps=1e-12)
    torch.manual_seed(0)
    decoder = Decoder(args)
    assert decoder.layers["0"].attention.wq.weight.shape == (48, 32)
    assert decoder.layers["0"].attention.wo.weight.shape == (32, 48)
    tokens, positions, documents = _inputs()
    before = decoder(tokens, positions, documents)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if ".wq." in name or ".wk." in name:
                parameter.mul_(16.0)
    torch.testing.assert_close(decoder(tokens, positions, documents), before, rtol=1e-4, atol=1e-5)


def test_split_evenly_gives_the_longer_ranges_to_the_middle() -> None:
    assert [len(part) for part in split_evenly(10, 4)] == [2, 3, 3, 2]
    assert [i for part in split_evenly(7, 3) for i in part] == list(range(7))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"qk_norm": True, "qkv_bias": True},
        {"moe": MoeShape(4, 2, 32)},
        {"moe": MoeShape(4, 2, 32, num_shared_experts=1)},
    ],
    ids=["dense", "norms and biases", "experts", "shared experts"],
)
def test_parallel_plan_names_every_module_with_parameters(more: dict[str, Any]) -> None:
    decoder = Decoder(dataclasses.replace(ARGS, **more))
    patterns = {name.replace("*", "0") for name in decoder.parallel_plan()}
    owners = {name.rpartition(".")[0] for name, _ in decoder.named_parameters()}
    assert {o for o in owners if not o.startswith("layers.") or o.startswith("layers.0.")} == patterns


def test_initial_weights_name_every_parameter() -> None:
    decoder = Decoder(dataclasses.replace(ARGS, qk_norm=True, qkv_bias=True))
    initial = decoder.initial_weights()
    assert set(initial) == {name for name, _ in decoder.named_parameters()}
    assert initial["layers.0.attention.wo.weight"].std == pytest.approx(0.02 / 8**0.5)
    assert initial["layers.3.ffn_norm.weight"].value == initial["layers.3.attention.k_norm.weight"].value == 1.0
    assert initial["layers.3.attention.wv.bias"] == Initial(value=0.0)
