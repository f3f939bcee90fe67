"""The user's own `torch.optim.Optimizer` over the plain local pieces of the parameters.

A rank holds pieces of tensors, so its rule must be element-wise, and what it remembers of a parameter must have the
parameter's shape or count its updates: then every piece goes on alike in any layout. `rule_of` finds this out on two
small tensors before anything is trained, and refuses any other. State is made by the class itself, at the first update
of each parameter; until then a checkpoint holds zeros, which a resumed run drops again.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.core.box import HeldTensor
from phalanx.core.errors import PhalanxError
from phalanx.models.own import calling_own, own_object, told
from phalanx.spec import Job
from phalanx.trainer.optimizer import Optimizer

_STEPS, _BOUND = 3, 1e-5
_KEY, _UPDATES = "optimizer.class", "an optimizer whose step() updates a matrix by its gradient"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a class remembers of each parameter. moments: names of tensors of its shape. counters: of numbers of
    updates, and the value after the first.
    """

    moments: tuple[str, ...]
    counters: Mapping[str, Any]


class OwnOptimizer(Optimizer):
    """As `Optimizer`, with the class that `[optimizer] class` names. Raises PhalanxError as `rule_of` does."""

    def __init__(self, job: Job, parameters: Sequence[HeldTensor]) -> None:
        self._rule = rule_of(job)
        self.moments = self._rule.moments
        self._max_norm, self._decayed = job.training.max_norm, job.optimizer.decayed
        self._peak_lr = job.optimizer.lr
        self.num_updates = 0
        self._held = list(parameters)
        self._params = [torch.nn.Parameter(held.local, requires_grad=True) for held in parameters]
        self._state = [{moment: torch.zeros_like(param.detach()) for moment in self.moments} for param in self._params]
        self._optimizer = made(job, self._groups(job.optimizer.weight_decay))

    def update(self, gradients: Sequence[Tensor | None], gradient_norm: float, lr_factor: float) -> None:
        """As `Optimizer.update`; what the class has made or replaced of its state is what is saved from now on."""
        super().update(gradients, gradient_norm, lr_factor)
        for state, param in zip(self._state, self._params, strict=True):
            if found := self._optimizer.state.get(param):
                state.update({moment: found[moment] for moment in self.moments})

    def resume(self, counters: Mapping[str, int | float]) -> None:
        """Goes on with the state that was restored in place. Before the first update the class makes its own."""
        self.num_updates = num_updates = int(counters["num_updates"])
        if not num_updates:
            return
        for state, param in zip(self._state, self._params, strict=True):
            counters = {name: _counted(first, num_updates) for name, first in self._rule.counters.items()}
            if param.numel():
                self._optimizer.state[param] = {**state, **counters}


def _counted(first: Any, num_updates: int) -> Any:
    return torch.full_like(first, num_updates) if isinstance(first, Tensor) else type(first)(num_updates)


def made(job: Job, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The user's optimizer over groups of parameters. Raises PhalanxError where it can't be imported, is no
    torch.optim.Optimizer, or does not take the arguments.
    """
    path, args = job.optimizer.class_, job.optimizer.args
    assert path is not None, "the job has no optimizer of its own"
    kind = own_object(_KEY, path)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise PhalanxError(_KEY, value=path, expected="a torch.optim.Optimizer", remedy="name a class derived from it")
    if "weight_decay" in args or "weight_decay" not in inspect.signature(kind).parameters:
        groups = [{name: value for name, value in group.items() if name != "weight_decay"} for group in groups]
    with calling_own(_KEY, "an optimizer that can be made", path):
        try:
            return kind(groups, **{"lr": job.optimizer.lr, **args})
        except (TypeError, ValueError) as error:
            raise PhalanxError(
                "optimizer.args",
                value=args,
                expected=f"arguments that {path} takes",
                remedy=f"correct them: {told(error)}",
            ) from error


def rule_of(job: Job) -> Rule:
    """What the job's own optimizer remembers. Raises PhalanxError where it is not element-wise, remembers what has
    another shape, or learns anything for all parameters together.
    """
    whole = _tried(job, [_weights()])
    quarters = _tried(
        job, [torch.tensor_split(half, 2, 1)[i].clone() for half in torch.tensor_split(_weights(), 2) for i in (0, 1)]
    )
    pieced = torch.cat([torch.cat(quarters.params[:2], 1), torch.cat(quarters.params[2:], 1)])
    if not torch.allclose(whole.params[0], pieced, rtol=_BOUND, atol=_BOUND):
        raise _refused(job, "an element-wise rule: a matrix updated in four pieces came out otherwise than whole")
    return whole.rule


@dataclass(frozen=True, slots=True)
class _Trial:
    params: list[Tensor]
    rule: Rule


def _tried(job: Job, tensors: Sequence[Tensor]) -> _Trial:
    """The tensors after a few updates with gradients that follow from their values."""
    params = [torch.nn.Parameter(tensor) for tensor in tensors]
    optimizer = made(job, [{"params": params, "weight_decay": job.optimizer.weight_decay}])
    settings, rule = _settings(job, optimizer), Rule((), {})
    for step in range(1, _STEPS + 1):
        for param in params:
            param.grad = torch.sin(3 * param.detach() + step)
        with calling_own(_KEY, _UPDATES, job.optimizer.class_):
            optimizer.step()
            state = dict(optimizer.state.get(params[0], {}))
        found = _rule(job, params[0], state, step)
        rule = found if step == 1 else rule
        if found.moments != rule.moments or found.counters.keys() != rule.counters.keys():
            raise _refused(job, "the same names of state after each update")
    if not all(param.isfinite().all() for param in params):
        raise _refused(job, "an optimizer that leaves finite weights finite where gradients are")
    if _settings(job, optimizer) != settings:
        raise _refused(job, "nothing that is learnt for all parameters together (its param_groups changed)")
    return _Trial([param.detach() for param in params], rule)


def _weights() -> Tensor:
    return torch.linspace(-1.0, 1.0, 24).view(4, 6)


def _settings(job: Job, optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    with calling_own(_KEY, "an optimizer that has param_groups", job.optimizer.class_):
        groups = optimizer.param_groups
        return [{name: repr(value) for name, value in group.items() if name != "params"} for group in groups]


def _rule(job: Job, param: Tensor, state: Mapping[str, Any], step: int) -> Rule:
    moments, counters = [], {}
    for name, value in state.items():
        is_tensor = isinstance(value, Tensor)
        if is_tensor and value.shape == param.shape and value.dtype == torch.float32:
            moments.append(name)
        elif (is_tensor and value.numel() == 1) or isinstance(value, int | float):
            if float(value) != step:
                raise _refused(job, f"numbers that count updates, but state {name!r} was {value} after {step}")
            counters[name] = value.clone() if is_tensor else value
        elif value is not None:
            shape = f" of shape {tuple(value.shape)}, {value.dtype}" if is_tensor else ""
            found = f"a {type(value).__name__}{shape}"
            raise _refused(job, f"state of the parameter's shape, fp32, but {name!r} is {found}")
    return Rule(tuple(moments), counters)


def _refused(job: Job, expected: str) -> PhalanxError:
    return PhalanxError(
        _KEY, value=job.optimizer.class_, expected=expected, remedy="ranks hold pieces of tensors; choose another rule"
    )
