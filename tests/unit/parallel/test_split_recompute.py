"""Full recompute under a split backward: the bits of none, each block's inside computed again once, and let go of."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.parallel.recompute import recomputing

WIDTH, TOKENS, DEPTH = 32, 64, 3


class Block(nn.Module):
    """A norm, a gated product and what it adds to; dropout between, and one operation that keeps its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up, self.down = (
            nn.Linear(*each, bias=False) for each in ((WIDTH, 96), (WIDTH, 96), (96, WIDTH))
        )

    def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: float = 0.0) -> Tensor:
        normed = self.norm(x)
        product = nn.functional.silu(self.gate(normed)) * self.up(normed).tanh()
        x = x + self.down(nn.functional.dropout(product, 0.25))
        return x + shift if scale is None else x * scale


def stage(**recompute: Any) -> nn.ModuleList:
    torch.manual_seed(1)
    blocks = nn.ModuleList(Block() for _ in range(DEPTH))
    for block in blocks:
        block.forward = recomputing(block.forward, **recompute)  # type: ignore[method-assign]
    return blocks


def forward(blocks: nn.ModuleList) -> tuple[Tensor, Tensor]:
    """What the stage takes and gives."""
    torch.manual_seed(2)
    given = torch.randn(TOKENS, WIDTH, requires_grad=True)
    scale, hidden = torch.rand(WIDTH), given
    for number, block in enumerate(blocks):
        hidden = block(hidden, scale if number else None, shift=0.5)
    return given, hidden


def split_backward(blocks: nn.ModuleList) -> list[Tensor]:
    """Gradients by torch's two halves, the input's first."""
    given, output = forward(blocks)
    (of_input,), groups = stage_backward_input([output], [torch.ones_like(output)], [given], blocks.parameters())
    assert of_input is not None
    stage_backward_weight(blocks.parameters(), groups)
    return _gradients(blocks, of_input)


def whole_backward(blocks: nn.ModuleList) -> list[Tensor]:
    given, output = forward(blocks)
    output.sum().backward()
    assert given.grad is not None
    return _gradients(blocks, given.grad)


def _gradients(blocks: nn.ModuleList, of_input: Tensor) -> list[Tensor]:
    return [of_input, *(each.grad for each in blocks.parameters() if each.grad is not None)]


class _Counting(TorchDispatchMode):
    """Counts an operation, those of recompute included."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.found = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func.overloadpacket.__name__ == self.name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backward", [split_backward, whole_backward])
def test_every_gradient_has_the_bits_of_no_recompute(backward: Callable[[nn.ModuleList], list[Tensor]]) -> None:
    plain, again = (backward(stage(**way)) for way in ({"mode": "none"}, {"mode": "full", "splits": True}))
    assert len(plain) == len(again) == 1 + 4 * DEPTH
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("backward", [split_backward, whole_backward])
def test_each_blocks_inside_is_computed_again_once(backward: Callable[[nn.ModuleList], list[Tensor]]) -> None:
    blocks = stage(mode="full", splits=True)
    with _Counting("silu") as counting:
        backward(blocks)
    assert counting.found == 2 * DEPTH


def test_random_numbers_after_a_backward_are_those_without_recompute() -> None:
    def drawn(**way: Any) -> float:
        whole_backward(stage(**way))
        return float(torch.rand(()))

    assert drawn(mode="none") == drawn(mode="full", splits=True)


def allocated(backward: Callable[[nn.ModuleList], list[Tensor]], **recompute: Any) -> tuple[int, int]:
    """Bytes that a forward and a backward have allocated, beyond what there was: most at once, and at the end."""
    blocks = stage(**recompute)
    backward(blocks)
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            backward(blocks)
    finally:
        gc.enable()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    total = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most, total


def passes_in_turn(blocks: nn.ModuleList) -> list[Tensor]:
    """Four forwards, then of each the two halves of its backward."""
    passes = [forward(blocks) for _ in range(4)]
    while passes:
        given, output = passes.pop()
        _, groups = stage_backward_input([output], [torch.ones_like(output)], [given], blocks.parameters())
        stage_backward_weight(blocks.parameters(), groups)
    return []


def test_whole_backward_lets_go_as_torchs_own_recompute_does() -> None:
    (own, _), (of_torch, _), (none, _) = (
        allocated(whole_backward, mode="full", splits=True),
        allocated(whole_backward, mode="full"),
        allocated(whole_backward, mode="none"),
    )
    assert own <= 1.05 * of_torch < none


def test_split_backward_holds_the_inside_of_its_own_pass_alone() -> None:
    (again, left), (of_torch, _), (none, _) = (
        allocated(passes_in_turn, mode="full", splits=True),
        allocated(passes_in_turn, mode="full"),
        allocated(passes_in_turn, mode="none"),
    )
    assert again < none and again < of_torch
    assert left <= 0, "what a pass computed again goes with it"


def test_second_run_that_keeps_something_else_is_an_error() -> None:
    width = iter((8, 16))

    def changing(x: Tensor) -> Tensor:
        return (x * torch.ones(next(width), 1)).exp()

    def fewer(x: Tensor) -> Tensor:
        return x.exp() if next(runs) else x + 1

    given = torch.randn(1, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"tensor 1 .* was \(8, 1\) torch.float32, in its second run \(16, 1\)"):
        recomputing(changing, "full", splits=True)(given).sum().backward()
    runs = iter((True, False))
    with pytest.raises(RuntimeError, match="kept 1 tensors for backward, its second run 0"):
        recomputing(fewer, "full", splits=True)(given).sum().backward()
