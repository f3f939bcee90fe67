"""Muon for the hidden matrices of a model, AdamW for all else (Keller Jordan et al. 2024, "Muon: an optimizer for
hidden layers in neural networks", kellerjordan.github.io/posts/muon).

With g the clipped gradient: m = u m + (1 - u) g; what is applied is (1 - u) g + u m (Nesterov), made orthogonal by the
quintic Newton-Schulz iteration and times 0.2 sqrt(max(rows, columns)), which gives it the root mean square of AdamW's
updates, so that one learning rate and one weight decay serve both (Liu et al. 2025, arXiv 2502.16982, section 2.2).

A rank holds boxes of matrices, and the iteration needs whole ones: each matrix is summed from its boxes on one rank of
those that hold its stage, its owner, made orthogonal there, and sent to all of them. Momentum lies where the parameter
lies, as `optim.<name>.momentum`, so a checkpoint knows nothing of owners, and every layout applies the same bits that
one process would compute from the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.core.box import HeldTensor, whole
from phalanx.parallel.mesh import Mesh
from phalanx.spec import Job
from phalanx.trainer.optimizer import MOMENTS, Optimizer, clip, is_inside

MOMENTUM = "momentum"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
# Of whole matrices that a rank holds at once beside its shards.
_AT_ONCE_BYTES = 1 << 30


def is_hidden(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates a parameter: a matrix inside one of the model's `layers`."""
    return is_inside(name) and len(shape) == 2


def orthogonal(matrix: Tensor, num_steps: int, dtype: torch.dtype) -> Tensor:
    """U V^T of a matrix [m, n] = U S V^T, nearly: singular values come to lie between 0.7 and 1.2; fp32 [m, n].

    X <- a X + (b X X^T + c (X X^T)^2) X, begun with X = matrix / its Frobenius norm. dtype: of the products.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if is_tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(num_steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = (x.t() if is_tall else x).float()
    return found


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One hidden matrix: what is held of it, its momentum, and which rank of the stage owns it."""

    held: HeldTensor
    momentum: Tensor
    index: int
    owner: int


class Muon(Optimizer):
    """As `Optimizer`, of which it has one for what is no hidden matrix.

    mesh: whose ranks that hold the same stage have the same list of parameters; None for one rank alone.
    """

    def __init__(self, job: Job, parameters: Sequence[HeldTensor], mesh: Mesh | None) -> None:
        settings = job.optimizer
        self._max_norm, self._peak_lr, self._weight_decay = job.training.max_norm, settings.lr, settings.weight_decay
        self._momentum, self._num_steps = settings.momentum, settings.ns_steps
        self._group = mesh.stage_group() if mesh is not None else None
        self._device = mesh.device if mesh is not None else None
        num_ranks = self._group.size() if self._group is not None else 1
        self._rest_of = [i for i, h in enumerate(parameters) if not is_hidden(h.name, h.global_shape)]
        self._rest = Optimizer(job, [parameters[i] for i in self._rest_of])
        self.num_updates = 0
        hidden = [(i, h) for i, h in enumerate(parameters) if is_hidden(h.name, h.global_shape)]
        self._matrices = [
            _Matrix(held, torch.zeros_like(held.local), index, number % num_ranks)
            for number, (index, held) in enumerate(hidden)
        ]
        narrow = job.training.mixed_precision_param == "bfloat16"
        self._dtypes = {"cpu": torch.float32, "cuda": torch.bfloat16 if narrow else torch.float32}

    def update(self, gradients: Sequence[Tensor | None], gradient_norm: float, lr_factor: float) -> None:
        """See `Optimizer.update`. All ranks of the stage call it together."""
        clip([gradients[each.index] for each in self._matrices], gradient_norm, self._max_norm)
        self._rest.update([gradients[i] for i in self._rest_of], gradient_norm, lr_factor)
        lr = self._peak_lr * lr_factor
        trained = [each for each in self._matrices if gradients[each.index] is not None]
        for batch in self._batches(trained):
            for matrix, update in zip(batch, self._whole_updates(batch, gradients), strict=True):
                rows, columns = matrix.held.global_shape
                mine = update[whole((rows, columns)).slices_of(matrix.held.box)].to(matrix.held.local.device)
                matrix.held.local.mul_(1 - lr * self._weight_decay)
                matrix.held.local.add_(mine, alpha=-lr * 0.2 * math.sqrt(max(rows, columns)))
        self.num_updates += 1

    def _batches(self, matrices: Sequence[_Matrix]) -> Iterator[list[_Matrix]]:
        batch: list[_Matrix] = []
        held_bytes = 0
        for matrix in matrices:
            num_bytes = 4 * math.prod(matrix.held.global_shape)
            if batch and held_bytes + num_bytes > _AT_ONCE_BYTES:
                yield batch
                batch, held_bytes = [], 0
            batch.append(matrix)
            held_bytes += num_bytes
        if batch:
            yield batch

    def _whole_updates(self, batch: Sequence[_Matrix], gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The orthogonal update of each matrix, whole, on every rank of the stage."""
        found = [self._placed(matrix, gradients[matrix.index]) for matrix in batch]
        self._exchange(batch, found, to_owner=True)
        me = self._group.rank() if self._group is not None else 0
        for matrix, update in zip(batch, found, strict=True):
            if matrix.owner == me:
                update.copy_(orthogonal(update, self._num_steps, self._dtypes[update.device.type]))
        self._exchange(batch, found, to_owner=False)
        return found

    def _placed(self, matrix: _Matrix, gradient: Tensor | None) -> Tensor:
        """This rank's box of what is to be made orthogonal, in a whole matrix of zeros; one holder of each box gives
        it.
        """
        assert gradient is not None, "only those that train come here"
        held = matrix.held
        matrix.momentum.lerp_(gradient.view(held.box.shape), 1 - self._momentum)
        update = torch.zeros(held.global_shape, device=self._device or held.local.device)
        if held.replica == 0:
            mine = update[whole(held.global_shape).slices_of(held.box)]
            mine.copy_(gradient.view(held.box.shape).lerp(matrix.momentum, self._momentum))
        return update

    def _exchange(self, batch: Sequence[_Matrix], updates: Sequence[Tensor], *, to_owner: bool) -> None:
        if self._group is None:
            return
        works = []
        for matrix, update in zip(batch, updates, strict=True):
            if to_owner:
                work = dist.reduce(update, group=self._group, group_dst=matrix.owner, async_op=True)
            else:
                work = dist.broadcast(update, group=self._group, group_src=matrix.owner, async_op=True)
            works.append(work)
        for work in works:
            assert work is not None, "a member of the group"
            work.wait()

    def state(self) -> list[HeldTensor]:
        """The momentum of hidden matrices, and the moments of the rest."""
        momenta = [
            replace(each.held, name=f"optim.{each.held.name}.{MOMENTUM}", local=each.momentum)
            for each in self._matrices
        ]
        return momenta + self._rest.state()

    def state_names(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """See `Optimizer.state_names`."""
        return [
            f"optim.{name}.{moment}"
            for name, shape in shapes.items()
            for moment in ((MOMENTUM,) if is_hidden(name, shape) else MOMENTS)
        ]

    def resume(self, counters: Mapping[str, int | float]) -> None:
        """See `Optimizer.resume`; Muon itself counts nothing."""
        self._rest.resume(counters)
        self.num_updates = self._rest.num_updates
