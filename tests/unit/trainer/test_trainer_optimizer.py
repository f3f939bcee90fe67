"""AdamW over pieces: empty ones, parameters without a gradient in some steps or for good, and where it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.core.box import Box, HeldTensor, whole
from phalanx.spec import Job, parse_job
from phalanx.trainer.optimizer import Optimizer, clip, new_state

LR, DECAY = 0.1, 0.1
IMPLEMENTATIONS = ("fused", "foreach", "for-loop")


def _job(implementation: str, max_norm: float = 0.0, **optimizer: Any) -> Job:
    return parse_job(
        {
            "job": {"name": "optimizer", "storage": "memory://optimizer"},
            "model": {"preset": "tiny"},
            "data": {"train": "memory://optimizer/train"},
            "training": {"seq_len": 8, "steps": 1, "global_batch_size": 1, "max_norm": max_norm},
            "optimizer": {"lr": LR, "weight_decay": DECAY, "implementation": implementation} | optimizer,
        }
    )


def _held(name: str, rows: int) -> HeldTensor:
    return HeldTensor(name, (2, 3), Box((0, 0), (rows, 3)), torch.ones(rows, 3))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rank_that_holds_only_empty_pieces_updates_nothing_and_counts(implementation: str) -> None:
    optimizer = Optimizer(_job(implementation, max_norm=1.0), [_held("a", 0), _held("b", 0)])
    optimizer.update([torch.ones(0, 3), None], 2.0, 1.0)  # the other ranks' pieces give the norm
    assert optimizer.num_updates == 1
    optimizer.resume({"num_updates": 5})
    assert optimizer.num_updates == 5
    assert [held.name for held in optimizer.state()] == [
        f"optim.{name}.{moment}" for name in ("a", "b") for moment in ("exp_avg", "exp_avg_sq")
    ]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_update_equals_torchs_adamw_beside_an_empty_piece(implementation: str) -> None:
    held, empty = _held("a", 2), _held("b", 0)
    optimizer = Optimizer(_job(implementation), [held, empty])
    theirs = torch.nn.Parameter(torch.ones(2, 3))
    adamw = torch.optim.AdamW([theirs], lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    for step in range(3):
        gradient = torch.arange(6.0).view(2, 3) * (step - 1)  # a zero gradient is a step like any other
        optimizer.update([gradient.clone(), torch.ones(0, 3)], 1.0, 1.0)
        theirs.grad = gradient
        adamw.step()
    torch.testing.assert_close(held.local, theirs.detach())


def test_parameter_that_does_not_train_is_left_alone() -> None:
    trained, frozen = _held("a", 2), _held("b", 2)
    optimizer = Optimizer(_job("fused"), [trained, frozen])
    optimizer.update([torch.ones(2, 3), None], 1.0, 1.0)
    assert torch.equal(frozen.local, torch.ones(2, 3)), "not even decayed"
    assert not torch.equal(trained.local, torch.ones(2, 3))


def test_resumed_optimizer_goes_on_bit_for_bit() -> None:
    straight = _held("a", 2)
    optimizer = Optimizer(_job("fused"), [straight])
    gradients = [torch.randn(2, 3, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    for gradient in gradients[:2]:
        optimizer.update([gradient.clone()], 1.0, 1.0)
    resumed = HeldTensor("a", (2, 3), whole((2, 3)), straight.local.clone())
    other = Optimizer(_job("fused"), [resumed])
    for mine, saved in zip(other.state(), optimizer.state(), strict=True):
        mine.local.copy_(saved.local)
    other.resume(optimizer.counters())
    for gradient in gradients[2:]:
        optimizer.update([gradient.clone()], 1.0, 1.0)
        other.update([gradient.clone()], 1.0, 1.0)
    assert torch.equal(resumed.local, straight.local)


@pytest.mark.parametrize(("implementation", "device"), [("fused", "meta"), ("foreach", "cpu"), ("for-loop", "cpu")])
def test_step_counter_lies_where_the_kernel_reads_it(implementation: str, device: str) -> None:
    state = new_state(torch.empty(2, device="meta"), implementation)
    assert state["step"].device.type == device
    assert state["exp_avg"].device.type == "meta"


@pytest.mark.parametrize(
    ("decayed", "expected"),
    [
        ("matrices", {"tok_embeddings.weight", "layers.0.wq.weight", "output.weight"}),
        ("hidden", {"layers.0.wq.weight"}),
        ("all", {"tok_embeddings.weight", "layers.0.wq.weight", "layers.0.norm.weight", "output.weight"}),
    ],
)
def test_weight_decay_acts_on_the_named_parameters_alone(decayed: str, expected: set[str]) -> None:
    shapes = {"tok_embeddings.weight": (4, 3), "layers.0.wq.weight": (3, 3), "output.weight": (4, 3)}
    shapes |= {"layers.0.norm.weight": (3,)}
    held = [HeldTensor(name, shape, whole(shape), torch.ones(shape)) for name, shape in shapes.items()]
    optimizer = Optimizer(_job("foreach", decayed=decayed), held)
    optimizer.update([torch.zeros(each.global_shape) for each in held], 0.0, 1.0)
    changed = {each.name for each in held if not torch.equal(each.local, torch.ones(each.global_shape))}
    assert changed == expected
    for each in held:
        assert each.name not in changed or torch.allclose(each.local, torch.tensor(1 - LR * DECAY))


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e6])
def test_pieces_are_clipped_as_torch_clips_the_whole(max_norm: float) -> None:
    """Pieces of one rank in several meshes: halves, thirds, none of a tensor's rows, and what doesn't train."""
    generator = torch.Generator().manual_seed(3)
    whole_gradients = [torch.randn(shape, generator=generator) for shape in ((6, 4), (9, 2), (5,), (2, 3, 4))]
    parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in whole_gradients]
    for parameter, gradient in zip(parameters, whole_gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    places = (slice(0, 3), slice(6, 9), slice(5, 5), slice(1, 2))
    pieces = [gradient[place].clone() for gradient, place in zip(whole_gradients, places, strict=True)]
    clip([*pieces, None], float(norm), max_norm)
    for piece, parameter, place in zip(pieces, parameters, places, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(piece, parameter.grad[place], rtol=1e-6, atol=0)
    assert (float(torch.stack([each.norm() for each in pieces]).norm()) < 1.0) == (max_norm == 1.0)
