"""Losses and metrics of the user's own: sums over tokens, called with whole logits in fp32 unless they take a part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.core.errors import PhalanxError
from phalanx.models.own import calling_own, own_function
from phalanx.parallel.collectives import gather_vocabulary
from phalanx.parallel.loss import IGNORED_TARGET, token_sum_cross_entropy
from phalanx.spec import Job

TokenSum = Callable[[Tensor, Tensor, dist.ProcessGroup | None], Tensor]
_PROBE_WINDOWS, _PROBE_LENGTH, _SUM_BOUND = 4, 6, 1e-4
_HALVES = (slice(0, _PROBE_LENGTH, 2), slice(1, _PROBE_LENGTH, 2))


def loss_of(job: Job) -> TokenSum:
    """What the job minimises, as a sum over tokens: (logits, targets, the group that cuts the vocabulary)."""
    if job.loss.fn is None:
        plain: TokenSum = token_sum_cross_entropy
        return plain
    return token_sum_of("loss.fn", job.loss.fn, job.loss.args)


def metrics_of(job: Job) -> dict[str, TokenSum]:
    """What the job evaluates beside the loss, by name."""
    return {name: token_sum_of(f"metrics.fn.{name}", path, {}) for name, path in job.metrics.fn.items()}


def token_sum_of(key: str, path: str, args: Mapping[str, Any]) -> TokenSum:
    """The user's function that `path`, the value of `key`, names; see `phalanx.models.protocol.TokenSumFunction`.

    Raises PhalanxError where there is none; the function that comes back does where it gives no sum.
    """
    function = own_function(key, path)
    takes_part = "group" in _parameters(function)

    def token_sum(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        if takes_part:
            found = function(logits.float(), targets, group=group, **args)
        else:
            whole = gather_vocabulary(logits, group) if group is not None else logits
            found = function(whole.float(), targets, **args)
        if not (isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point()):
            is_tensor = isinstance(found, Tensor)
            shown = f"{found.dtype} of shape {tuple(found.shape)}" if is_tensor else type(found).__name__
            raise PhalanxError(
                key,
                value=path,
                expected=f"a function that gives a 0-dimensional tensor of floats, not {shown}",
                remedy="give the sum over the tokens whose target is not -100",
            )
        return found.float()

    return token_sum


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: it takes no group
        return {}


def check_token_sum(
    key: str, path: str, args: Mapping[str, Any], vocab_size: int, *, cuts_windows: bool = False
) -> None:
    """Tries a loss or a metric on a few random logits. Raises PhalanxError where it fails, or is no sum over tokens:
    then micro-batches and ranks would not add up to one batch. cuts_windows: whether it gets parts of windows.
    """
    token_sum = token_sum_of(key, path, args)
    logits, targets = _probe(vocab_size)
    before = logits.clone(), targets.clone()
    none = torch.full_like(targets, IGNORED_TARGET)
    with torch.no_grad(), calling_own(key, "a function of logits [B, S, V] and targets [B, S]", path):
        whole = float(token_sum(logits, targets, None))
        is_changed = not (torch.equal(logits, before[0]) and torch.equal(targets, before[1]))
        parts = [float(token_sum(logits[i : i + 1], targets[i : i + 1], None)) for i in range(_PROBE_WINDOWS)]
        empty = float(token_sum(logits, none, None))
        halves = [float(token_sum(logits[:, cut], targets[:, cut], None)) for cut in _HALVES]
    if is_changed:
        raise PhalanxError(
            key,
            value=path,
            expected="a function that leaves its logits and targets as they are: others are given the same",
            remedy="write what it computes into tensors of its own",
        )
    size = max(abs(whole), sum(map(abs, parts)), 1.0)
    if not (abs(whole - sum(parts)) <= _SUM_BOUND * size and abs(empty) <= _SUM_BOUND):
        raise PhalanxError(
            key,
            value=path,
            expected=f"a sum over the tokens whose target is not -100: a batch gave {whole:.6g}, its windows one by "
            f"one {sum(parts):.6g}, and windows without targets {empty:.6g}",
            remedy="sum over tokens instead of averaging, and leave out targets of -100",
        )
    if cuts_windows and not abs(whole - sum(halves)) <= _SUM_BOUND * max(size, sum(map(abs, halves))):
        raise PhalanxError(
            key,
            value=path,
            expected=f"with [parallel] cp > 1 a function of each token by itself, as ranks share windows: a batch gave "
            f"{whole:.6g}, every other token and the rest {sum(halves):.6g}",
            remedy="set cp = 1, or let it look at no other tokens",
        )


def check_gradient(path: str, args: Mapping[str, Any], vocab_size: int) -> None:
    """Raises PhalanxError where nothing flows back from `[loss] fn` into the logits, or not finite numbers."""
    token_sum = token_sum_of("loss.fn", path, args)
    logits, targets = _probe(vocab_size)
    logits.requires_grad_()
    with torch.enable_grad(), calling_own("loss.fn", "a loss whose gradient can be taken", path):
        found = token_sum(logits, targets, None)
        if found.requires_grad:
            torch.autograd.backward(found)
    if logits.grad is None or not logits.grad.isfinite().all():
        raise PhalanxError(
            "loss.fn",
            value=path,
            expected="a loss with a finite gradient by its logits, which random ones don't have",
            remedy="compute it with torch, from the logits as they are given",
        )


def _probe(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Random logits [B, S, V], and targets [B, S] of which some don't count."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(_PROBE_WINDOWS, _PROBE_LENGTH, vocab_size, generator=generator)
    targets = torch.randint(0, vocab_size, (_PROBE_WINDOWS, _PROBE_LENGTH), generator=generator)
    targets[0, :2] = targets[2:, :3] = IGNORED_TARGET
    return logits, targets
