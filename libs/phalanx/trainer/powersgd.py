"""Gradients between replicas as products of narrow matrices (PowerSGD, Vogels, Karimireddy and Jaggi 2019, arXiv
1905.13727, algorithms 1 and 2), with error feedback.

Of a gradient M [n, m] replicas sum P = M Q [n, r], make its columns orthonormal, and sum Q = M' P [m, r]: r (n + m)
numbers instead of n m. P Q' stands for the summed gradient, and Q is what the next step begins with, one step of a
power iteration. What a replica's own product leaves out of its own M is added to its next gradient. Tensors that this
would not make smaller (norms, biases, narrow matrices) are summed as they are. A rank compresses the piece that it
holds: its rows of each matrix.

Every replica computes P Q' from the same sums by the same operations, so all hold the same bits where their processors
are alike. With r at least the rank of the summed gradient, it is the sum itself, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from phalanx.core.box import HeldTensor
from phalanx.core.errors import PhalanxError
from phalanx.core.philox import key_of
from phalanx.parallel.replicas import ReplicaLink
from phalanx.trainer.optimizer import is_inside


class PowerSgd:
    """What one rank keeps between steps of the matrices that it holds: what was left out, and the last Q.

    held: the rank's parameters; rank: r; compressed: of `gradient_compression.compressed`. Both start anew with the
    process: a restart leaves out what was not sent. Raises PhalanxError where the model has nothing to compress.
    """

    def __init__(self, link: ReplicaLink, held: Sequence[HeldTensor], rank: int, seed: int, compressed: str) -> None:
        self._link = link
        chosen = {i: each for i, each in enumerate(held) if compressed == "matrices" or is_inside(each.name)}
        check_some(chosen.values(), rank, compressed)
        self._shapes = {i: shape for i, each in chosen.items() if (shape := matrix_shape(each.box.shape, rank))}
        self._errors = {i: held[i].local.new_zeros(shape) for i, shape in self._shapes.items()}
        self._queries = {i: self._drawn(held[i], min(rank, *shape), seed) for i, shape in self._shapes.items()}
        self._pending: tuple[dict[int, Tensor], dict[int, Tensor]] | None = None

    def _drawn(self, held: HeldTensor, rank: int, seed: int) -> Tensor:
        """Standard normal numbers, the same in all replicas."""
        low, high = key_of("powersgd", seed, held.name)
        generator = torch.Generator().manual_seed((high << 32 | low) & (1 << 63) - 1)
        columns = held.local.numel() // held.box.shape[0]
        return torch.randn(columns, rank, generator=generator).to(held.local.device)

    @torch.no_grad()
    def exchange(self, gradients: Sequence[Tensor | None]) -> None:
        """Each gradient becomes what stands for its sum over the replicas, in place. `settle` follows."""
        matrices = {
            i: gradient.view(self._shapes[i]).add(self._errors[i])
            for i, gradient in enumerate(gradients)
            if gradient is not None and i in self._shapes
        }
        self._link.sum([g for i, g in enumerate(gradients) if g is not None and i not in matrices])
        products = {i: matrix @ self._queries[i] for i, matrix in matrices.items()}
        self._link.sum(list(products.values()))
        bases = {i: torch.linalg.qr(product).Q for i, product in products.items()}
        own = {i: matrices[i].T @ basis for i, basis in bases.items()}
        summed = {i: each.clone() for i, each in own.items()}
        self._link.sum(list(summed.values()))
        for i, basis in bases.items():
            gradient = gradients[i]
            assert gradient is not None, "only given ones are in `matrices`"
            torch.mm(basis, summed[i].T, out=gradient.view(self._shapes[i]))
            matrices[i].sub_(basis @ own[i].T)
        self._pending = matrices, summed

    def settle(self, *, applied: bool) -> None:
        """What was left out counts from now on; where the update was not applied, all is as before the step."""
        if applied and self._pending is not None:
            errors, queries = self._pending
            self._errors.update(errors)
            self._queries.update(queries)
        self._pending = None


def check_some(chosen: Iterable[HeldTensor], rank: int, compressed: str) -> None:
    """Raises PhalanxError where no whole parameter becomes smaller: the job would train as if nothing were set."""
    if any(matrix_shape(each.global_shape, rank) for each in chosen):
        return
    inside = " inside `layers`" if compressed == "hidden" else ""
    remedy = 'set gradient_compression.compressed = "matrices", ' if compressed == "hidden" else ""
    raise PhalanxError(
        "gradient_compression.rank",
        value=rank,
        expected=f"few enough columns for one matrix{inside} of the model to become smaller: none does",
        remedy=f"{remedy}lower it, or remove gradient_compression",
    )


def matrix_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """Rows and columns of a piece as a matrix; None where r (n + m) numbers are not fewer than its n m."""
    if len(shape) < 2 or not all(shape):
        return None
    rows = shape[0]
    columns = 1
    for size in shape[1:]:
        columns *= size
    return (rows, columns) if rank * (rows + columns) < rows * columns else None
