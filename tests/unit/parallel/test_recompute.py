"""Recompute of blocks: the bits of no recompute, for less memory."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.core.box import whole
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.models.protocol import split_evenly
from phalanx.parallel.initialise import fill
from phalanx.parallel.recompute import recomputing
from phalanx.parallel.sharding import prepare_blocks
from phalanx.spec.parallel import ActivationCheckpoint

ARGS = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 64, "qk_norm": True}
WAYS = [("selective", 1), ("selective", 3), ("full", 1), ("full", 2)]


def _decoder(mode: str, every: int = 1, attn_backend: str = "sdpa") -> Decoder:
    decoder = Decoder(DecoderArgs.of_plain(ARGS), attn_backend)
    initial = decoder.initial_weights()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            shape = tuple(parameter.shape)
            fill(parameter, whole(shape), shape, initial[name], 1, name)
    prepare_blocks(decoder, ActivationCheckpoint.model_validate({"mode": mode, "every": every}), compiled=False)
    return decoder


def _loss(decoder: Decoder) -> Tensor:
    tokens = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(3))
    positions, documents = torch.arange(32).expand(2, -1), torch.arange(32).expand(2, -1) // 12
    logits = decoder(tokens[:, :-1], positions, documents)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _gradients(decoder: Decoder) -> list[Tensor]:
    _loss(decoder).backward()
    return [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("attn_backend", ["sdpa", "varlen"])
@pytest.mark.parametrize(("mode", "every"), WAYS)
def test_every_gradient_has_the_bits_of_no_recompute(mode: str, every: int, attn_backend: str) -> None:
    plain, again = (_gradients(_decoder(*way, attn_backend)) for way in (("none", 1), (mode, every)))
    assert len(plain) == len(again) == 4 * 11 + 3
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


class _Counting(TorchDispatchMode):
    """Counts the operations that are really run, those of recompute included."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_selective_recompute_does_no_product_and_no_attention_twice() -> None:
    def counts(mode: str) -> tuple[int, int, int]:
        decoder = _decoder(mode)
        with _Counting() as counting:
            _gradients(decoder)
        names = ("mm", "silu", "_scaled_dot_product_flash_attention_for_cpu")
        return tuple(counting.found[name] for name in names)  # type: ignore[return-value]

    products = 3 * (4 * 7 + 1)
    assert counts("none") == (products, 4, 4)
    assert counts("selective") == (products, 8, 4)
    assert counts("full") == (products + 4 * 6, 8, 8)  # the product that ends a block is never needed again


def test_memory_falls_from_none_over_selective_to_full_and_with_more_blocks() -> None:
    ways = [("none", 1), ("selective", 2), ("selective", 1), ("full", 1)]
    peaks = [_peak(_decoder(*way)) for way in ways]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks), dict(zip(ways, peaks, strict=True))
    halves = [_peak(_decoder("full", every)) for every in (4, 2, 1)]
    assert halves == sorted(halves, reverse=True) and len(set(halves)) == 3, halves


def _peak(decoder: Decoder) -> int:
    """Most bytes that a forward and a backward held at once beyond what was there."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _gradients(decoder)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


def test_blocks_are_chosen_by_their_number_in_the_whole_model() -> None:
    def recomputed(decoder: Decoder) -> list[str]:
        return [
            name
            for name, block in decoder.layers.items()
            if "forward" in vars(block) and "checkpoint" in repr(block.forward)
        ]

    assert recomputed(_decoder("full", 3)) == ["0", "3"]
    found = []
    for layers in split_evenly(4, 3):
        stage = Decoder(DecoderArgs.of_plain(ARGS))._stage(layers)
        prepare_blocks(stage, ActivationCheckpoint.model_validate({"mode": "selective", "every": 3}), compiled=False)
        found += recomputed(stage)
    assert found == ["0", "3"]


def test_marks_for_a_profiler_may_differ_where_the_inside_is_done_again():
    weight, rounds = torch.randn(4, 4, requires_grad=True), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        rounds.append(len(rounds))
        for number in range(1 + 2 * len(rounds)):
            with torch.profiler.record_function(f"mark {number}"):
                pass
        return torch.mm(x, weight).sin()

    x = torch.randn(3, 4, requires_grad=True)
    recomputing(forward, "selective")(x).sum().backward()
    assert rounds == [0, 1]
    again = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(torch.mm(again, weight.detach()).sin().sum(), again)
    assert torch.equal(x.grad, expected)
