"""PowerSGD on one rank: what is sent stands for the gradient, and nothing that is left out is lost."""

from __future__ import annotations

import pytest
import torch

from phalanx.core.box import HeldTensor, whole
from phalanx.core.errors import PhalanxError
from phalanx.parallel.replicas import ReplicaLink
from phalanx.trainer.powersgd import PowerSgd, matrix_shape


def held(*shapes: tuple[int, ...]) -> list[HeldTensor]:
    return [HeldTensor(f"p{i}", shape, whole(shape), torch.zeros(shape)) for i, shape in enumerate(shapes)]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_gradient_of_at_most_the_rank_arrives_whole() -> None:
    gradient = drawn(1, 24, 3) @ drawn(2, 3, 40)
    power, given = PowerSgd(ReplicaLink(None), held((24, 40)), 4, seed=7, compressed="matrices"), [gradient.clone()]
    power.exchange(given)
    torch.testing.assert_close(given[0], gradient, rtol=1e-4, atol=1e-4)


def test_what_is_sent_and_what_is_kept_add_up_to_what_was_given() -> None:
    power, total_sent, total_given = PowerSgd(ReplicaLink(None), held((24, 40)), 2, seed=7, compressed="matrices"), 0, 0
    for step in range(6):
        gradient = drawn(step, 24, 40)
        given = [gradient.clone()]
        power.exchange(given)
        power.settle(applied=True)
        total_sent, total_given = total_sent + given[0], total_given + gradient
    torch.testing.assert_close(total_sent + power._errors[0], total_given, rtol=1e-4, atol=1e-4)


def test_constant_gradient_arrives_in_the_mean() -> None:
    gradient = drawn(3, 24, 40)
    power, sent = PowerSgd(ReplicaLink(None), held((24, 40)), 4, seed=7, compressed="matrices"), torch.zeros(24, 40)
    for step in range(1, 121):
        given = [gradient.clone()]
        power.exchange(given)
        power.settle(applied=True)
        sent += given[0]
        if step == 1:
            first = (given[0] - gradient).norm() / gradient.norm()
    error = (sent / 120 - gradient).norm() / gradient.norm()
    assert first > 0.5 and error < 0.1


def test_one_power_iteration_a_step_finds_the_best_matrices_of_the_rank() -> None:
    gradient = drawn(4, 24, 8) @ torch.diag(torch.tensor([8.0, 4, 2, 1, 0.5, 0.25, 0.1, 0.05])) @ drawn(5, 8, 40)
    left, values, right = torch.linalg.svd(gradient)
    best = left[:, :2] @ torch.diag(values[:2]) @ right[:2]
    power = PowerSgd(ReplicaLink(None), held((24, 40)), 2, seed=7, compressed="matrices")
    for _ in range(30):
        given = [gradient.clone()]
        power.exchange(given)
        power._errors[0].zero_()  # without feedback each step sees the same matrix
        power._queries.update(power._pending[1])  # type: ignore[index]
    assert (given[0] - best).norm() < 1e-3 * best.norm()


def test_update_that_is_left_out_leaves_no_trace() -> None:
    power, other = (PowerSgd(ReplicaLink(None), held((24, 40), (40,)), 2, 7, "matrices") for _ in range(2))
    broken = [torch.full((24, 40), torch.nan), torch.ones(40)]
    power.exchange(broken)
    power.settle(applied=False)
    for each in (power, other):
        given = [drawn(6, 24, 40), torch.ones(40)]
        each.exchange(given)
        each.settle(applied=True)
        assert torch.isfinite(given[0]).all() and torch.equal(given[1], torch.ones(40))
    assert torch.equal(power._errors[0], other._errors[0])


def test_gradient_that_does_not_exist_is_passed_over() -> None:
    power = PowerSgd(ReplicaLink(None), held((24, 40), (24, 40)), 2, seed=7, compressed="matrices")
    gradient = drawn(6, 24, 40)
    power.exchange([None, gradient])
    power.settle(applied=True)
    assert not power._errors[0].any() and power._errors[1].any()


def test_only_matrices_inside_layers_are_taken_apart_where_hidden_ones_are_asked_for() -> None:
    tensors = [
        HeldTensor(name, (24, 40), whole((24, 40)), torch.zeros(24, 40))
        for name in ("tok_embeddings.weight", "layers.0.wq.weight", "output.weight")
    ]
    gradients = [drawn(step, 24, 40) for step in range(3)]
    for compressed, changed in (("hidden", [False, True, False]), ("matrices", [True] * 3)):
        power, given = PowerSgd(ReplicaLink(None), tensors, 2, 7, compressed), [each.clone() for each in gradients]
        power.exchange(given)
        assert [not torch.equal(a, b) for a, b in zip(given, gradients, strict=True)] == changed


@pytest.mark.parametrize(
    ("rank", "compressed", "remedy"),
    [(2, "hidden", 'set gradient_compression.compressed = "matrices"'), (15, "matrices", "lower it, or remove")],
)
def test_model_of_which_nothing_would_become_smaller_is_refused(rank: int, compressed: str, remedy: str) -> None:
    with pytest.raises(PhalanxError, match=f"gradient_compression.rank is {rank}: .*; {remedy}"):
        PowerSgd(ReplicaLink(None), held((24, 40), (40,)), rank, 7, compressed)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((24, 40), (24, 40)), ((40,), None), ((4, 4), None), ((0, 40), None), ((6, 8, 9), (6, 72)), ((), None)],
)
def test_only_what_becomes_smaller_is_a_matrix(shape: tuple[int, ...], expected: tuple[int, int] | None) -> None:
    assert matrix_shape(shape, 4) == expected
