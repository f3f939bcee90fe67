"""Momenta as signs: what travels, what is kept back, and what an update makes of it."""

from __future__ import annotations

import pytest
import torch

from phalanx.core.box import HeldTensor, whole
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job, parse_job
from phalanx.trainer.onebit import BLOCK, OneBitAdam, SignMean, pack, unpack
from phalanx.trainer.optimizer import Optimizer


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(BLOCK,), (4 * BLOCK,), (3, 2 * BLOCK)])
def test_signs_and_scales_come_back_from_an_eighth_of_a_byte_and_two_bytes_a_block(shape: tuple[int, ...]) -> None:
    values = drawn(1, *shape)
    packed = pack(values, torch.full((*shape[:-1], shape[-1] // BLOCK), float(BLOCK)))
    assert packed.dtype == torch.uint8
    assert packed.shape == (*shape[:-1], shape[-1] // 8 + 2 * shape[-1] // BLOCK)
    blocks = values.unflatten(-1, (-1, BLOCK))
    expected = blocks.abs().mean(-1, keepdim=True).bfloat16().float() * torch.where(blocks >= 0, 1.0, -1.0)
    assert torch.equal(unpack(packed, shape[-1]), expected.flatten(-2))


def test_bits_lie_lowest_first() -> None:
    values = torch.full((BLOCK,), -1.0)
    values[[0, 3, 15]] = 1.0
    assert pack(values, torch.tensor([float(BLOCK)]))[:3].tolist() == [0b1001, 0b10000000, 0]


def test_what_is_kept_back_is_sent_later() -> None:
    sizes, values = (2 * BLOCK, 9), [drawn(2, 2 * BLOCK), drawn(3, 9)]
    mean, total = SignMean(ReplicaLink(None), sizes, torch.device("cpu")), torch.zeros(2 * BLOCK + 9)
    for step in range(400):
        sent = [each.clone() for each in values]
        mean.average(sent)
        if step == 0:
            assert (sent[0] - values[0]).norm() > 0.4 * values[0].norm(), "one message alone says little"
        total += torch.cat(sent)
    kept = (mean.worker_error.flatten() + mean.server_error)[: 2 * BLOCK + 9]
    torch.testing.assert_close(total + kept, 400 * torch.cat(values), rtol=1e-3, atol=1e-2)
    assert (total / 400 - torch.cat(values)).norm() < 0.1 * torch.cat(values).norm()
    assert not mean.worker_error.flatten()[2 * BLOCK + 9 :].any(), "what fills a block up is nothing"


def job(warmup: int) -> Job:
    return parse_job(
        {
            "job": {"name": "x", "storage": "memory://x"},
            "model": {"preset": "tiny"},
            "data": {"train": "memory://x/train"},
            "training": {"seq_len": 8, "steps": 6, "global_batch_size": 1},
            "optimizer": {"lr": 1e-2, "implementation": "foreach"},
            "gradient_compression": {"method": "onebit_adam", "warmup_steps": warmup},
        }
    )


def held() -> list[HeldTensor]:
    shapes = ((6, 10), (5,))
    return [HeldTensor(f"p{i}", s, whole(s), drawn(i, *s)) for i, s in enumerate(shapes)]


def gradients(tensors: list[HeldTensor], step: int) -> list[torch.Tensor | None]:
    return [torch.sin(3 * each.local + step) for each in tensors]


def test_warm_up_is_adamw_bit_for_bit() -> None:
    ours, theirs = held(), held()
    one, plain = OneBitAdam(job(4), ours, ReplicaLink(None)), Optimizer(job(4), theirs)
    for step in range(4):
        assert not one.is_frozen
        one.update(gradients(ours, step), 2.0, 1.0)
        plain.update(gradients(theirs, step), 2.0, 1.0)
    assert one.is_frozen
    assert all(torch.equal(a.local, b.local) for a, b in zip(ours, theirs, strict=True))


def test_update_behind_the_warm_up_is_adamw_with_the_second_moment_of_its_end() -> None:
    tensors = held()
    one = OneBitAdam(job(3), tensors, ReplicaLink(None))
    for step in range(3):
        one.update(gradients(tensors, step), 0.5, 1.0)
    before = {each.name: each.local.clone() for each in [*tensors, *one.state()]}
    given = gradients(tensors, 3)
    copies = [each.clone() for each in given if each is not None]
    one.update(given, 4.0, 0.5)
    lr, scale = 0.5e-2, 1.0 / (4.0 + 1e-6)
    for held_tensor, gradient in zip(tensors, copies, strict=True):
        name = held_tensor.name
        momentum = 0.9 * before[f"optim.{name}.exp_avg"] + 0.1 * scale * gradient
        variance = before[f"optim.{name}.exp_avg_sq"]
        decayed = before[name] * (1 - lr * (0.1 if gradient.dim() > 1 else 0.0))
        step = momentum / (1 - 0.9**4) / ((variance / (1 - 0.95**3)).sqrt() + 1e-8)
        torch.testing.assert_close(held_tensor.local, decayed - lr * step)
    after = {each.name: each.local for each in one.state()}
    assert all(torch.equal(after[name], before[name]) for name in after if name.endswith("exp_avg_sq"))
    assert one.counters() == {"num_updates": 4, "num_variance_updates": 3}


def test_element_that_nothing_reached_in_the_warm_up_stays() -> None:
    tensors = held()
    one = OneBitAdam(job(1), tensors, ReplicaLink(None))
    first = gradients(tensors, 0)
    assert first[1] is not None
    first[1][2] = 0.0
    one.update(first, 0.5, 1.0)
    kept = float(tensors[1].local[2])
    one.update(gradients(tensors, 1), 0.5, 1.0)
    assert float(tensors[1].local[2]) == kept
    assert torch.isfinite(tensors[1].local).all()


def test_resumed_optimizer_goes_on_with_the_frozen_moment() -> None:
    tensors = held()
    one = OneBitAdam(job(2), tensors, ReplicaLink(None))
    for step in range(4):
        one.update(gradients(tensors, step), 0.5, 1.0)
    copies = [HeldTensor(each.name, each.global_shape, each.box, each.local.clone()) for each in tensors]
    other = OneBitAdam(job(2), copies, ReplicaLink(None))
    for mine, its in zip(other.state(), one.state(), strict=True):
        mine.local.copy_(its.local)
    other.resume(one.counters())
    one.update(gradients(tensors, 5), 0.5, 1.0)
    other.update(gradients(copies, 5), 0.5, 1.0)
    assert all(torch.equal(a.local, b.local) for a, b in zip(tensors, copies, strict=True))
