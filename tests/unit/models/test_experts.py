"""Experts against a loop over tokens, written out: outputs, gradients, choices, and the loss that balances them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.models.args import DecoderArgs, MoeShape
from phalanx.models.decoder import Decoder, FeedForward
from phalanx.models.experts import Experts, MixtureFeedForward, Router, stored_names

DIM, WIDTH = 16, 24
CPU = torch.device("cpu")
SHAPES = {
    "one of two": {"num_experts": 2, "top_k": 1},
    "as mixtral": {"num_experts": 8, "top_k": 2},
    "not normalised": {"num_experts": 6, "top_k": 3, "normalise": False},
    "every expert": {"num_experts": 3, "top_k": 3},
    "more experts than tokens": {"num_experts": 64, "top_k": 2},
    "shared": {"num_experts": 4, "top_k": 2, "num_shared_experts": 2},
    "as deepseek-v3": {
        "num_experts": 8,
        "top_k": 3,
        "score": "sigmoid",
        "route_scale": 2.5,
        "num_groups": 4,
        "top_groups": 2,
        "selection_bias": True,
        "num_shared_experts": 1,
    },
    "groups of softmax": {"num_experts": 8, "top_k": 2, "num_groups": 2, "top_groups": 1},
}


def _shape(name: str, **more: Any) -> MoeShape:
    return MoeShape(expert_ffn_dim=WIDTH, **SHAPES[name] | more)


def _mixture(shape: MoeShape, seed: int = 0) -> MixtureFeedForward:
    torch.manual_seed(seed)
    width = shape.num_shared_experts * WIDTH
    mixture = MixtureFeedForward(DIM, shape, FeedForward(DIM, width) if width else None)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(std=0.3)
    return mixture


def _chosen_by_hand(shape: MoeShape, scores: Tensor, bias: Tensor | None) -> list[int]:
    """Experts of one token, [E] scores, best first."""
    choice = (scores if bias is None else scores + bias).tolist()
    size = shape.num_experts // shape.num_groups
    groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(shape.num_groups)]
    worth = [sum(group[: 1 if bias is None else 2]) for group in groups]
    allowed = sorted(range(shape.num_groups), key=lambda g: -worth[g])[: shape.top_groups]
    experts = [e for e in range(shape.num_experts) if e // size in allowed]
    return sorted(experts, key=lambda e: -choice[e])[: shape.top_k]


def _by_hand(mixture: MixtureFeedForward, x: Tensor) -> Tensor:
    """Token by token, each through its experts one after the other."""
    router, experts, shape = mixture.router, mixture.experts, mixture.router.shape
    outputs = []
    for token in x.flatten(0, 1):
        logits = router.weight @ token
        scores = logits.softmax(0) if shape.score == "softmax" else logits.sigmoid()
        chosen = _chosen_by_hand(shape, scores, router.selection_bias)
        weights = scores[chosen]
        weights = shape.route_scale * (weights / weights.sum() if shape.normalise else weights)
        y = torch.zeros(DIM)
        for weight, e in zip(weights, chosen, strict=True):
            hidden = F.silu(experts.w1[e] @ token) * (experts.w3[e] @ token)
            y = y + weight * (experts.w2[e] @ hidden)
        outputs.append(y if mixture.shared is None else y + mixture.shared(token))
    return torch.stack(outputs).view_as(x)


def _trained(mixture: MixtureFeedForward) -> dict[str, Tensor]:
    return {name: p for name, p in mixture.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", SHAPES)
def test_experts_give_outputs_and_gradients_of_a_loop_over_tokens(name: str) -> None:
    mixture = _mixture(_shape(name))
    x = torch.randn(2, 7, DIM, requires_grad=True)
    found, expected = mixture(x), _by_hand(mixture, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights, trained = torch.randn(found.shape), _trained(mixture)
    inputs = [x, *trained.values()]
    theirs = torch.autograd.grad((expected * weights).sum(), inputs, allow_unused=True)
    ours = torch.autograd.grad((found * weights).sum(), inputs, allow_unused=True)
    for what, a, b in zip(("x", *trained), ours, theirs, strict=True):
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, what=what: f"{what}: {text}")


@pytest.mark.parametrize("crowded", [0, 3])
def test_all_tokens_on_one_expert_leave_the_others_with_zero_gradients(crowded: int) -> None:
    experts = Experts(DIM, _shape("as mixtral", num_experts=4, top_k=1))
    x = torch.randn(1, 5, DIM)
    chosen = torch.full((1, 5, 1), crowded)
    y = experts(x, chosen, torch.ones(1, 5, 1))
    y.square().sum().backward()
    expected = F.linear(
        F.silu(F.linear(x, experts.w1[crowded])) * F.linear(x, experts.w3[crowded]), experts.w2[crowded]
    )
    torch.testing.assert_close(y, expected)
    for weight in (experts.w1, experts.w2, experts.w3):
        assert weight.grad is not None
        assert [bool(part.any()) for part in weight.grad] == [expert == crowded for expert in range(4)]


def test_experts_without_any_token_give_nothing_and_zero_gradients() -> None:
    experts = Experts(DIM, _shape("as mixtral"))
    rows = torch.zeros(0, DIM, requires_grad=True)
    y = experts.segments(rows, torch.zeros(8, dtype=torch.int64))
    assert y.shape == (0, DIM)
    y.sum().backward()
    assert experts.w2.grad is not None and not experts.w2.grad.any()


@pytest.mark.parametrize("counts", [[3, 0, 2, 5], [0, 0, 10, 0], [10, 0, 0, 0], [1, 2, 3, 4]])
def test_the_grouped_product_gives_what_a_product_for_each_expert_gives(counts: list[int]) -> None:
    """The way of a GPU, which torch also has on CPUs."""
    experts = Experts(DIM, _shape("as mixtral", num_experts=4))
    rows, sizes = torch.randn(10, DIM), torch.tensor(counts)
    loop, grouped = experts.segments(rows, sizes), experts._grouped(rows, sizes)
    torch.testing.assert_close(grouped, loop, rtol=1e-5, atol=1e-7)
    weights = torch.randn(10, DIM)
    parameters = list(experts.parameters())
    ours, theirs = (torch.autograd.grad((y * weights).sum(), parameters) for y in (grouped, loop))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_token_does_not_see_which_others_it_travels_with() -> None:
    mixture = _mixture(_shape("as deepseek-v3"))
    x = torch.randn(3, 9, DIM)
    together = mixture(x)
    for window in range(3):
        torch.testing.assert_close(mixture(x[window : window + 1])[0], together[window], rtol=1e-5, atol=1e-6)


def _loss_by_hand(router: Router, x: Tensor, window_weights: list[float]) -> Tensor:
    shape, total = router.shape, torch.zeros(())
    for window, weight in zip(x, window_weights, strict=True):
        logits = window @ router.weight.T
        scores = logits.softmax(-1) if shape.score == "softmax" else logits.sigmoid()
        shares = (scores / scores.sum(-1, keepdim=True)).mean(0)
        counts = torch.zeros(shape.num_experts)
        for token in scores:
            for e in _chosen_by_hand(shape, token.detach(), router.selection_bias):
                counts[e] += 1
        busy = shape.num_experts / (shape.top_k * len(window)) * counts
        total = total + weight * shape.aux_loss * (busy * shares).sum()
    return total


@pytest.mark.parametrize("name", ["as mixtral", "as deepseek-v3", "not normalised"])
def test_the_loss_of_balance_and_its_gradient_are_as_written_out(name: str) -> None:
    mixture = _mixture(_shape(name, aux_loss=0.7))
    router, x = mixture.router, torch.randn(3, 6, DIM, requires_grad=True)
    window_weights = [0.25, 0.0, 0.5]
    y = mixture(x, torch.tensor(window_weights))
    inputs = [router.weight, x]
    found = torch.autograd.grad(y.sum(), inputs)
    expected_loss = _loss_by_hand(router, x, window_weights)
    expected = torch.autograd.grad(_by_hand(mixture, x).sum() + expected_loss, inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    _, loss = router.balance.take(CPU)
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-5, atol=1e-6)


def test_an_even_router_has_a_loss_of_its_weight() -> None:
    """sum_i f_i P_i is 1 where every expert has the same, whatever top_k (Switch Transformer, section 2.2)."""
    shape = _shape("as mixtral", num_experts=4, aux_loss=0.01)
    router = Router(4, shape)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    x = torch.stack([torch.eye(4)[[e, (e + 1) % 4]].sum(0) for e in range(4)]).unsqueeze(0).requires_grad_()
    _, weights = router(x, torch.ones(1))
    weights.sum().backward()
    counts, loss = router.balance.take(CPU)
    assert counts.tolist() == [2, 2, 2, 2]
    torch.testing.assert_close(loss, torch.tensor(0.01))


def test_counts_and_loss_do_not_depend_on_how_windows_are_cut_into_micro_batches() -> None:
    mixture = _mixture(_shape("as mixtral", aux_loss=0.3))
    x, window_weights = torch.randn(4, 5, DIM), torch.tensor([0.1, 0.2, 0.0, 0.7])
    found = []
    for size in (4, 2, 1):
        mixture.zero_grad()
        for part, weights in zip(x.split(size), window_weights.split(size), strict=True):
            mixture(part, weights).sum().backward()
        assert mixture.router.weight.grad is not None
        found.append((*mixture.router.balance.take(CPU), mixture.router.weight.grad.clone()))
    for counts, loss, gradient in found[1:]:
        assert torch.equal(counts, found[0][0])
        torch.testing.assert_close(loss, found[0][1])
        torch.testing.assert_close(gradient, found[0][2], rtol=1e-4, atol=1e-6)
    assert int(found[0][0].sum()) == 3 * 5 * 2, "the window without weight is not counted"


def test_what_recomputation_runs_twice_is_counted_once() -> None:
    mixture = _mixture(_shape("as mixtral", aux_loss=0.3))
    x, weights = torch.randn(2, 5, DIM, requires_grad=True), torch.tensor([0.5, 0.5])
    checkpoint(mixture, x, weights, use_reentrant=False).sum().backward()
    again, plain_loss = mixture.router.balance.take(CPU)
    mixture(x, weights).sum().backward()
    counts, loss = mixture.router.balance.take(CPU)
    assert torch.equal(again, counts) and torch.equal(plain_loss, loss) and int(counts.sum()) == 20


def test_evaluation_counts_nothing() -> None:
    mixture = _mixture(_shape("as mixtral", aux_loss=0.3))
    with torch.no_grad():
        mixture(torch.randn(2, 5, DIM), torch.ones(2))
    counts, loss = mixture.router.balance.take(CPU)
    assert not counts.any() and float(loss) == 0.0


def test_the_bias_moves_the_choice_and_not_the_weights() -> None:
    router = Router(DIM, _shape("as mixtral", score="sigmoid", selection_bias=True, normalise=False))
    x = torch.randn(1, 6, DIM)
    assert router.selection_bias is not None and not router.selection_bias.requires_grad
    with torch.no_grad():
        router.selection_bias[5] = 10.0
        chosen, weights = router(x, None)
    assert (chosen == 5).any(-1).all()
    torch.testing.assert_close(weights, F.linear(x, router.weight).sigmoid().gather(-1, chosen))


def test_a_decoder_of_experts_takes_window_weights_and_has_initial_values_for_every_parameter() -> None:
    moe = _shape("as deepseek-v3", aux_loss=0.1)
    args = DecoderArgs(dim=DIM, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=0, vocab_size=32, moe=moe)
    decoder = Decoder(args)
    tokens = torch.arange(12).view(2, 6)
    decoder(tokens, torch.arange(6).expand(2, -1), None, torch.tensor([0.5, 0.5])).sum().backward()
    assert list(decoder.routers) == ["0", "1"]
    for router in decoder.routers.values():
        counts, loss = router.balance.take(CPU)
        assert int(counts.sum()) == 12 * moe.top_k and float(loss) > 0
    initial = decoder.initial_weights()
    assert list(initial) == list(stored_names(decoder))
    stacked = {name for name in initial if ".experts." in name}
    experts = range(moe.num_experts)
    weights = ("w1", "w2", "w3")
    assert stacked == {
        f"layers.{layer}.feed_forward.experts.{expert}.{weight}.weight"
        for layer in range(2)
        for expert in experts
        for weight in weights
    }
    assert initial.keys() - stacked == {name for name, _ in decoder.named_parameters() if ".experts." not in name}
    assert initial["layers.1.feed_forward.router.selection_bias"].value == 0.0
    assert initial["layers.1.feed_forward.experts.0.w2.weight"] == initial["layers.1.attention.wo.weight"]
    assert DecoderArgs.of_plain(dataclasses.asdict(args)) == args


def test_a_decoder_of_experts_gives_shapes_on_the_meta_device() -> None:
    args = DecoderArgs(
        dim=DIM, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=0, vocab_size=32, moe=_shape("as deepseek-v3")
    )
    with torch.device("meta"):
        decoder = Decoder(args)
        ids = torch.zeros(2, 6, dtype=torch.int64)
    assert decoder(ids, ids, None).shape == (2, 6, 32)
