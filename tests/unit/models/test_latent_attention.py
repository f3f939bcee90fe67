"""Latent attention: transformers' own module and an attention written out head by head say the same, gradients too."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs, MlaShape, MoeShape, RopeScaling
from phalanx.models.attention import WholeWindows
from phalanx.models.decoder import Decoder, FeedForward
from phalanx.models.experts import MixtureFeedForward
from phalanx.models.hugging_face import config_to_hugging_face, name_to_hugging_face
from phalanx.models.kernels import Window, kernel_named
from phalanx.models.latent import LatentAttention
from phalanx.models.rotary import rotary_table

MLA = MlaShape(kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=24)
MOE = MoeShape(8, 3, 24, 1, "sigmoid", True, 2.5, 4, 2, selection_bias=True, first_k_dense=1)
YARN = RopeScaling("yarn", 4.0, 16, beta_fast=2.0, mscale=1.0, mscale_all_dim=1.0)
ARGS = DecoderArgs(
    dim=48, n_layers=3, n_heads=4, n_kv_heads=4, ffn_dim=40, vocab_size=64, norm_eps=1e-6, moe=MOE, mla=MLA
)
SHAPES: dict[str, dict[str, Any]] = {
    "queries from a latent": {},
    "queries from the input": {"mla": dataclasses.replace(MLA, q_lora_rank=0)},
    "yarn": {"rope_scaling": YARN},
    "yarn of two magnitudes": {"rope_scaling": RopeScaling("yarn", 4.0, 16, mscale=0.7, mscale_all_dim=1.2)},
    "yarn without magnitudes": {"rope_scaling": RopeScaling("yarn", 4.0, 16)},
    "values wider than queries": {"mla": dataclasses.replace(MLA, v_head_dim=26)},
    "values as wide as queries": {"mla": dataclasses.replace(MLA, v_head_dim=20)},
}
LENGTH = 24


def _args(shape: str) -> DecoderArgs:
    return dataclasses.replace(ARGS, **SHAPES[shape])


def _attention(args: DecoderArgs, kernel: str = "sdpa") -> LatentAttention:
    """Its weights drawn at random, norms too."""
    torch.manual_seed(5)
    attention = LatentAttention(args, WholeWindows(kernel_named(kernel)))
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.dim() == 1))
    return attention


def _input() -> Tensor:
    return torch.randn(2, LENGTH, ARGS.dim, generator=torch.Generator().manual_seed(6)).requires_grad_()


def _positions() -> Tensor:
    return torch.arange(LENGTH).expand(2, -1)


def _applied(attention: LatentAttention, args: DecoderArgs, x: Tensor, documents: Tensor | None = None) -> Tensor:
    mask = attention.attend.mask(_positions(), documents)
    found: Tensor = attention(x, *rotary_table(_positions(), args), mask)
    return found


def _assert_equal_gradients(ours: Tensor, theirs: Tensor, inputs: list[Tensor], their_inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(7))
    found = torch.autograd.grad((ours * weights).sum(), inputs)
    expected = torch.autograd.grad((theirs * weights).sum(), their_inputs)
    for a, b in zip(found, expected, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
def test_latent_attention_and_its_gradients_equal_those_of_transformers(shape: str) -> None:
    theirs_of = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    transformers = pytest.importorskip("transformers")
    args, x, y = _args(shape), _input(), _input()
    attention = _attention(args)
    said = config_to_hugging_face(args, max_position_embeddings=LENGTH)
    config = transformers.DeepseekV3Config.from_dict({**said, "attn_implementation": "eager"})
    theirs = theirs_of.DeepseekV3Attention(config, 0)
    names = {n: name_to_hugging_face(f"layers.0.attention.{n}") for n, _ in attention.named_parameters()}
    prefix = "model.layers.0.self_attn."
    theirs.load_state_dict({names[n].removeprefix(prefix): p for n, p in attention.named_parameters()})
    table = theirs_of.DeepseekV3RotaryEmbedding(config)(y, _positions())
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    found = theirs(y, table, mask[None, None])[0]
    own = dict(theirs.named_parameters())
    their_inputs = [y, *(own[names[n].removeprefix(prefix)] for n, _ in attention.named_parameters())]
    _assert_equal_gradients(_applied(attention, args, x), found, [x, *attention.parameters()], their_inputs)


def _by_hand(attention: LatentAttention, args: DecoderArgs, x: Tensor, scale: float) -> Tensor:
    """Head by head, each from its rows of the whole matrices; pairs turned one by one as complex numbers."""
    mla = args.mla
    assert mla is not None
    plain, turned = mla.qk_nope_head_dim, mla.qk_rope_head_dim

    def normal(latent: Tensor, weight: Tensor) -> Tensor:
        return latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def rotated(part: Tensor) -> Tensor:
        angles = torch.arange(LENGTH)[:, None] * args.rope_theta ** (-torch.arange(0, turned, 2) / turned)
        pairs = torch.view_as_complex(part.reshape(*part.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    if attention.wq_a is not None:
        assert attention.q_a_norm is not None and attention.wq_b is not None
        queries = normal(x @ attention.wq_a.weight.T, attention.q_a_norm.weight) @ attention.wq_b.weight.T
    else:
        assert attention.wq is not None
        queries = x @ attention.wq.weight.T
    both = x @ attention.wkv_a.weight.T
    latent = normal(both[..., : mla.kv_lora_rank], attention.kv_a_norm.weight)
    shared = rotated(both[..., mla.kv_lora_rank :])
    sees = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    outputs = []
    for head in range(args.n_heads):
        query = queries[..., head * (plain + turned) : (head + 1) * (plain + turned)]
        weight = attention.wkv_b.weight[head * (plain + mla.v_head_dim) : (head + 1) * (plain + mla.v_head_dim)]
        key, value = latent @ weight[:plain].T, latent @ weight[plain:].T
        scores = query[..., :plain] @ key.mT + rotated(query[..., plain:]) @ shared.mT
        outputs.append((scores * scale).masked_fill(~sees, -torch.inf).softmax(-1) @ value)
    return torch.cat(outputs, -1) @ attention.wo.weight.T


@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if "yarn" not in name])
def test_latent_attention_and_its_gradients_equal_an_attention_written_out(shape: str, kernel: str) -> None:
    args, x = _args(shape), _input()
    attention = _attention(args, kernel)
    expected = _by_hand(attention, args, x, 1 / math.sqrt(20))
    inputs = [x, *attention.parameters()]
    _assert_equal_gradients(_applied(attention, args, x), expected, inputs, inputs)


def test_scores_of_scaled_windows_are_multiplied_as_deepseek_has_it() -> None:
    assert ARGS.softmax_scale == pytest.approx(20**-0.5)
    assert _args("yarn").softmax_scale == pytest.approx(20**-0.5 * (0.1 * math.log(4) + 1) ** 2)
    assert _args("yarn without magnitudes").softmax_scale == pytest.approx(20**-0.5)
    two = _args("yarn of two magnitudes")
    assert two.softmax_scale == pytest.approx(20**-0.5 * (0.12 * math.log(4) + 1) ** 2)
    assert two.rope_scaling is not None
    assert two.rope_scaling.attention_factor == pytest.approx((0.07 * math.log(4) + 1) / (0.12 * math.log(4) + 1))


@pytest.mark.parametrize("shape", ["queries from a latent", "values wider than queries"])
def test_documents_are_kept_apart_alike_by_every_kernel(shape: str) -> None:
    args, x = _args(shape), _input()
    documents = torch.tensor([[0] * 5 + [1] * 11 + [2] * 8, [0] * 24])
    found = {kernel: _applied(_attention(args, kernel), args, x, documents) for kernel in ("sdpa", "varlen")}
    torch.testing.assert_close(found["varlen"], found["sdpa"], rtol=1e-5, atol=1e-5)
    changed = x.detach().clone()
    changed[0, :5] += 1.0
    after = _applied(_attention(args), args, changed, documents)
    assert torch.equal(after[0, 5:], found["sdpa"][0, 5:]) and not torch.equal(after[0, :5], found["sdpa"][0, :5])


@pytest.mark.parametrize("width", [4, 16, 20])
def test_flex_gives_what_sdpa_gives_where_heads_of_values_have_another_width(width: int) -> None:
    """Forward alone: torch has no backward of it on CPUs."""
    draw = torch.Generator().manual_seed(8)
    query, key = (torch.randn(2, 4, 32, 16, generator=draw) for _ in range(2))
    value = torch.randn(2, 4, 32, width, generator=draw)
    window = Window(2, 32, torch.device("cpu"), torch.tensor([[0] * 9 + [1] * 23] * 2))
    found = []
    for name in ("sdpa", "flex", "varlen"):
        kernel = kernel_named(name)
        found.append(kernel(query, key, value, kernel.mask(window), 0.4))
    assert [tuple(each.shape) for each in found] == [(2, 4, 32, width)] * 3
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-5, atol=1e-5)


def test_layers_before_the_experts_are_dense_in_every_stage() -> None:
    torch.manual_seed(0)
    decoder = Decoder(ARGS)
    kinds = [type(layer.feed_forward) for layer in decoder.layers.values()]
    assert kinds == [FeedForward, MixtureFeedForward, MixtureFeedForward]
    assert list(decoder.routers) == ["1", "2"]
    first, last = decoder.split_layers((1, 2))
    assert isinstance(first, Decoder) and isinstance(last, Decoder)
    assert list(first.routers) == [] and list(last.routers) == ["1", "2"]
    tokens = torch.randint(0, 64, (2, LENGTH))
    hidden = first(tokens, _positions(), None)
    assert torch.equal(last(hidden, _positions(), None), decoder(tokens, _positions(), None))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_kv_heads": 2}, "n_kv_heads"),
        ({"head_dim": 16}, "head_dim"),
        ({"qk_norm": True}, "qk_norm"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"mla": dataclasses.replace(MLA, qk_rope_head_dim=7), "head_dim": 0}, "mla.qk_rope_head_dim"),
    ],
)
def test_shapes_that_latent_attention_does_not_have_are_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PhalanxError, match=rf"\[model.args\] {message} is .*: expected"):
        dataclasses.replace(ARGS, **{"head_dim": 0, **change})
