"""The summed cross-entropy against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.parallel.loss import chunked_sums, token_sum_cross_entropy, token_sums


def _drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(2, 9, 30, generator=generator) * 5).to(dtype).requires_grad_()
    targets = torch.randint(0, 30, (2, 9), generator=generator)
    targets[0, :4] = -100
    return logits, targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_equal_torchs(dtype: torch.dtype) -> None:
    logits, targets = _drawn(dtype)
    loss = token_sum_cross_entropy(logits, targets)
    (loss / 7).backward()
    theirs = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(theirs.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    (expected / 7).backward()
    assert loss.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad, theirs.grad.to(dtype))


def test_loss_without_any_valid_target_is_zero_with_zero_gradient() -> None:
    logits, targets = _drawn(torch.float32)
    loss = token_sum_cross_entropy(logits, torch.full_like(targets, -100))
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_loss_of_huge_logits_stays_finite() -> None:
    logits = torch.tensor([[[1e30, -1e30, 0.0]]], requires_grad=True)
    loss = token_sum_cross_entropy(logits, torch.tensor([[0]]))
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("coefficient", [0.0, 1e-4, 0.3])
@pytest.mark.parametrize("chunk", [0, 4])
def test_z_loss_and_its_gradient_equal_torchs_logsumexp(coefficient: float, chunk: int) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, 9, 6, generator=generator, requires_grad=True)
    weight = torch.randn(30, 6, generator=generator, requires_grad=True)
    _, targets = _drawn(torch.float32)
    if chunk:
        loss, squares = chunked_sums(hidden, weight, targets, chunk)
    else:
        loss, squares = token_sums(F.linear(hidden, weight), targets)
    ((loss + coefficient * squares) / 7).backward()
    theirs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = F.linear(*theirs)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    log_z = logits[targets != -100].logsumexp(-1)
    ((expected + coefficient * log_z.square().sum()) / 7).backward()
    torch.testing.assert_close(squares.double(), log_z.square().sum(), rtol=1e-5, atol=1e-5)
    for ours, other in zip((hidden, weight), theirs, strict=True):
        assert ours.grad is not None and other.grad is not None
        torch.testing.assert_close(ours.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


def test_z_loss_alone_has_a_gradient_of_its_own() -> None:
    logits, targets = _drawn(torch.float32)
    token_sums(logits, targets)[1].backward()
    theirs = logits.detach().requires_grad_()
    theirs[targets != -100].logsumexp(-1).square().sum().backward()
    assert logits.grad is not None and theirs.grad is not None
    torch.testing.assert_close(logits.grad, theirs.grad)
