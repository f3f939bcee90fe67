"""Cross-entropy summed over tokens, on whole logits or on logits whose vocabulary is cut over `tp` and which are never
gathered; or from the hidden state on, a chunk of tokens at a time, so that the logits of all tokens never exist
at once.

Beside it the sum over tokens of log^2 Z, with Z the sum of exp(logits) over the vocabulary: a small coefficient times
it keeps log Z near 0 (PaLM, arXiv 2204.02311, section 5). Its gradient is 2 log Z times the probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.precision import linear

IGNORED_TARGET = -100


@dataclass(frozen=True, slots=True)
class _Targets:
    """Where each token's target lies in the local part of the vocabulary; bool and int64 of the targets' shape."""

    valid: Tensor
    mine: Tensor
    column: Tensor

    @classmethod
    def of(cls, targets: Tensor, width: int, group: dist.ProcessGroup | None) -> _Targets:
        first = group.rank() * width if group else 0
        valid = targets != IGNORED_TARGET
        mine = valid & (targets >= first) & (targets < first + width)
        return cls(valid, mine, torch.where(mine, targets - first, 0))


@dataclass(frozen=True, slots=True)
class _Sums:
    """By token, fp32, with m the maximum of the local logits and M that of the whole vocabulary.

    exponentials: exp(x - m) of the local logits x. total: the sum of exp(x - M) over the vocabulary. local_total: the
    same times exp(M - m). at_target: x - M at the target. maximum: M.
    """

    exponentials: Tensor
    total: Tensor
    local_total: Tensor
    at_target: Tensor
    maximum: Tensor

    @property
    def log_total(self) -> Tensor:
        """log Z."""
        return self.total.log() + self.maximum


def _sums(logits: Tensor, targets: _Targets, group: dist.ProcessGroup | None) -> _Sums:
    """One exchange: each rank gives its maximum, its sum of exponentials, and its logit at the target or 0."""
    local_maximum = logits.amax(-1).float().clamp_(min=torch.finfo(torch.float32).min)
    target = torch.where(targets.mine, logits.gather(-1, targets.column.unsqueeze(-1)).squeeze(-1).float(), 0.0)
    exponentials = (logits.float() - local_maximum.unsqueeze(-1)).exp_()
    total = exponentials.sum(-1)
    if group is None:
        return _Sums(exponentials, total, total, target - local_maximum, local_maximum)
    own = torch.stack((local_maximum, total, target))
    parts = own.new_empty(group.size(), *own.shape)
    dist.all_gather_single(parts.flatten(0, 1), own, group=group)
    maxima, totals, at_targets = parts.unbind(1)
    maximum = maxima.amax(0)
    total = (totals * (maxima - maximum).exp()).sum(0)
    local_total = total * (maximum - local_maximum).exp()
    return _Sums(exponentials, total, local_total, at_targets.sum(0) - maximum, maximum)


def _token_sum(sums: _Sums, targets: _Targets) -> Tensor:
    return torch.where(targets.valid, sums.total.log() - sums.at_target, 0.0).sum()


def _square_sum(log_sums: Tensor, targets: _Targets) -> Tensor:
    return torch.where(targets.valid, log_sums.square(), 0.0).sum()


def _gradient(
    counted: Tensor, targets: _Targets, scale: Tensor | None, log_sums: Tensor, square_scale: Tensor | None
) -> Tensor:
    """(probability - 1 at the target) x scale + 2 log Z x probability x square_scale, in place of `counted`:
    probabilities, 0 where none counts. A scale that is None counts as 0.
    """
    of_target = -targets.mine.unsqueeze(-1).to(counted.dtype)
    if square_scale is None:
        assert scale is not None, "backward of a function of which nothing was used"
        counted.scatter_add_(-1, targets.column.unsqueeze(-1), of_target)
        return counted.mul_(scale)
    scale = torch.zeros_like(square_scale) if scale is None else scale
    counted.mul_((scale + 2 * square_scale * log_sums).unsqueeze(-1))
    return counted.scatter_add_(-1, targets.column.unsqueeze(-1), of_target * scale)


class _TokenSum(torch.autograd.Function):
    """Sums over valid tokens of log(sum exp(x)) - x[target], with x shifted by its maximum, and of log^2 Z; all in
    fp32.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        found = _Targets.of(targets, logits.shape[-1], group)
        sums = _sums(logits, found, group)
        log_sums = sums.log_total
        probabilities = sums.exponentials.div_(sums.local_total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, log_sums, found.valid, found.mine, found.column)
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return _token_sum(sums, found), _square_sum(log_sums, found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        probabilities, log_sums, valid, mine, column = ctx.saved_tensors
        counted = probabilities * valid.unsqueeze(-1)
        gradient = _gradient(counted, _Targets(valid, mine, column), gradients[0], log_sums, gradients[1])
        return gradient.to(ctx.dtype), None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def token_sums(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """Sums over tokens of the cross-entropy and of log^2 Z, fp32 0-dim, the same on every rank of `group`.

    logits: [B, S, V], or [B, S, V / n] where `group` (n ranks, in order of vocabulary) cuts the vocabulary.
    targets: int64 [B, S]; -100 doesn't count.
    """
    return _TokenSum.apply(logits, targets, group)  # type: ignore[no-any-return, no-untyped-call]


class _WholeTokenSum(torch.autograd.Function):
    """The first sum of `_TokenSum` on logits of the whole vocabulary, in fewer passes over them: torch's log_softmax,
    which gradients overwrite.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_probabilities = torch.log_softmax(logits, -1, dtype=torch.float32)
        valid = targets != IGNORED_TARGET
        column = torch.where(valid, targets, 0).unsqueeze(-1)
        ctx.save_for_backward(log_probabilities, valid, column)
        ctx.dtype = logits.dtype
        return -torch.where(valid, log_probabilities.gather(-1, column).squeeze(-1), 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        log_probabilities, valid, column = ctx.saved_tensors
        scale = (gradients[0] * valid).unsqueeze(-1)
        gradient = log_probabilities.exp_().mul_(scale).scatter_add_(-1, column, -scale)
        return gradient.to(ctx.dtype), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def token_sum_cross_entropy(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The first of `token_sums`. Backward may run once."""
    if group is None:
        return _WholeTokenSum.apply(logits, targets)  # type: ignore[no-any-return, no-untyped-call]
    summed: Tensor = token_sums(logits, targets, group)[0]
    return summed


class _ChunkedTokenSum(torch.autograd.Function):
    """As `_TokenSum`, of logits = hidden weight^T, which both passes compute chunk by chunk. Between them lie only the
    inputs and log(sum exp(logits)) of each token, so that backward exchanges nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        total, squares = torch.zeros(2, dtype=torch.float32, device=hidden.device).unbind()
        log_sums = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            found = _Targets.of(targets[part], weight.shape[0], group)
            sums = _sums(linear(hidden[part], weight), found, group)
            log_sums[part] = sums.log_total
            total = total + _token_sum(sums, found)
            squares = squares + _square_sum(log_sums[part], found)
        ctx.save_for_backward(hidden, weight, targets, log_sums)
        ctx.chunk, ctx.group = chunk, group
        ctx.set_materialize_grads(False)
        return total, squares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, log_sums = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            found = _Targets.of(targets[part], weight.shape[0], ctx.group)
            probabilities = (linear(hidden[part], weight).float() - log_sums[part].unsqueeze(-1)).exp_()
            counted = probabilities.mul_(found.valid.unsqueeze(-1))
            gradient = _gradient(counted, found, gradients[0], log_sums[part], gradients[1]).to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[part] = linear(gradient, weight.t())
            if of_weight is not None:
                _add_product(of_weight, gradient.t(), hidden[part])
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left right to the fp32 `total`; on CPUs computed in fp32, see `phalanx.parallel.precision`."""
    if total.device.type == "cpu":
        total.addmm_(left.float(), right.float())
    else:
        total += left @ right


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunked_sums(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """As `token_sums` of logits that are never whole: those of `chunk` tokens exist at a time, and
    backward computes them again.

    hidden: [B, S, D], what the head takes. weight: the head's, [V, D], or [V / n, D] where `group` cuts the vocabulary.
    The gradient of `hidden` is then this rank's part of a sum over the group.
    """
    flat = hidden.flatten(0, -2)
    return _ChunkedTokenSum.apply(flat, weight, targets.flatten(), chunk, group)  # type: ignore[no-any-return, no-untyped-call]


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The first of `chunked_sums`."""
    summed: Tensor = chunked_sums(hidden, weight, targets, chunk, group)[0]
    return summed
