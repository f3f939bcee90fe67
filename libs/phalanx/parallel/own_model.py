"""What a model of the user's own gives: its methods called and looked at, its parameters and buffers such as ranks can
share, make real and keep in checkpoints. What is not so is told in one line.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from phalanx.core.errors import PhalanxError
from phalanx.models.experts import stored_shapes
from phalanx.models.own import calling_own
from phalanx.models.protocol import HasInitialWeights, HasParallelPlan, HasStages, Initial, KeyValueHeads, Style
from phalanx.parallel.sharding import blocks_of


def stages_of_model(model: nn.Module, num_stages: int) -> Sequence[nn.Module]:
    """What `split_stages` gives. Raises PhalanxError where it fails, or gives another number of modules."""
    assert isinstance(model, HasStages), "check_layout refused it"
    with calling_own("split_stages()", f"{num_stages} modules"):
        given: Any = model.split_stages(num_stages)
        stages = tuple(given)
        wrong = next((type(stage).__name__ for stage in stages if not isinstance(stage, nn.Module)), None)
    if wrong is not None:
        raise PhalanxError(
            "split_stages()", value=f"with a {wrong}", expected=f"{num_stages} modules", remedy="give nn.Modules alone"
        )
    if len(stages) != num_stages:
        raise PhalanxError(
            "split_stages()", value=len(stages), expected=f"{num_stages} stages", remedy="give as many as asked for"
        )
    return stages


def plan_of(model: nn.Module) -> Mapping[str, Style]:
    """What `parallel_plan` gives, empty where there is none. Raises PhalanxError where it fails or is no plan."""
    if not isinstance(model, HasParallelPlan):
        return {}
    with calling_own("parallel_plan()", "styles by patterns of names"):
        plan: Any = model.parallel_plan()
    shown = plan if isinstance(plan, Mapping) else type(plan).__name__
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        raise PhalanxError(
            "parallel_plan()", value=shown, expected="a dict of styles by patterns of names", remedy="give one"
        )
    for pattern, style in plan.items():
        if not isinstance(style, str | KeyValueHeads):
            raise PhalanxError(
                f"parallel_plan() {pattern}",
                value=style,
                expected="a style",
                remedy="see phalanx.models.protocol.Style",
            )
    return plan


def initial_of(model: nn.Module) -> Mapping[str, Initial] | None:
    """What `initial_weights` gives, None where there is no such method. Raises PhalanxError where it fails, leaves a
    parameter out, or gives what no parameter can begin with.
    """
    if not isinstance(model, HasInitialWeights):
        return None
    with calling_own("initial_weights()", "an Initial for every parameter by its name"):
        given: Any = model.initial_weights()
        initial = dict(given)
    for name in stored_shapes(model):
        if not _is_initial(found := initial.get(name)):
            raise PhalanxError(
                f"initial_weights() {name}",
                value=found if name in initial else "missing",
                expected="an Initial with a finite std of at least 0, or a finite value",
                remedy="see phalanx.models.protocol.Initial",
            )
    return initial


def _is_initial(found: Any) -> bool:
    numbers = (found.value, 0.0 if found.std is None else found.std) if isinstance(found, Initial) else ("",)
    are_numbers = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    return are_numbers and (found.std is None or found.std >= 0)


def require_alike(model: nn.Module, device: torch.device) -> None:
    """All ranks together: PhalanxError where a meta-device model has other parameters or buffers on one rank than on
    rank 0; what they send each other would not fit.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in named]
    own = int.from_bytes(hashlib.sha256(repr(shapes).encode()).digest()[:7])
    mine = torch.tensor([own], dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    other = next((rank for rank, digest in enumerate(every) if int(digest) != int(every[0])), None)
    if other is not None:
        raise PhalanxError(
            f"[model] class {type(model).__name__}",
            expected=f"the same parameters and buffers on every rank, but those of rank {other} have other names, "
            "shapes or another order than those of rank 0",
            remedy="let them follow from [model.args] alone, not from the environment, the machine or a set's order",
        )


def check_state(model: nn.Module) -> None:
    """PhalanxError where the model has parameters that ranks could not share, buffers that no checkpoint would hold, or
    what torch does not know.
    """
    _check_parameters(model)
    _check_buffers(model)
    _check_attributes(model)


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PhalanxError(
                f"[model] class {type(model).__name__}, parameter {name}",
                expected="a shape that __init__ gives, not one that the first forward finds",
                remedy="use the module that isn't lazy",
            )
        if parameter.dim() == 0 or not parameter.is_floating_point():
            raise PhalanxError(
                f"[model] class {type(model).__name__}, parameter {name}",
                value=f"{parameter.dtype} of shape {tuple(parameter.shape)}",
                expected="floats of one dimension at least: ranks share parameters by their first one",
                remedy="give it the shape [1], or make what is not learnt a non-persistent buffer",
            )


def check_shared(model: nn.Module) -> None:
    """PhalanxError where a layer shares a parameter with another or with what is outside of `layers`: each is gathered
    by itself.
    """
    blocks = blocks_of(model)
    own = [{id(parameter) for parameter in block.parameters()} for block in blocks]
    inside = {id(inner) for block in blocks for inner in block.modules()}
    outside = (inner for inner in model.modules() if id(inner) not in inside)
    own.append({id(parameter) for inner in outside for parameter in inner.parameters(recurse=False)})
    for name, parameter in model.named_parameters():
        if sum(id(parameter) in each for each in own) > 1:
            raise PhalanxError(
                f"[model] class {type(model).__name__}, parameter {name}",
                expected="one that no two of `layers` share, nor one of them and the rest: each is cut by itself",
                remedy="give each its own, or share the whole layer; with dp_replicate alone and weights of float32 "
                "they may share",
            )


def _check_buffers(model: nn.Module) -> None:
    kept = model.state_dict().keys()
    for name, _ in model.named_buffers(remove_duplicate=False):
        if name in kept:
            raise PhalanxError(
                f"[model] class {type(model).__name__}, buffer {name}",
                expected="no persistent buffer: checkpoints hold parameters only, so it would be lost at a restart",
                remedy="register_buffer(..., persistent=False) what __init__ makes anew; what is learnt is a parameter",
            )


def _check_attributes(model: nn.Module) -> None:
    """Ranks make parameters and buffers real; what modules hold besides would stay on the meta device."""
    known = {id(inner) for inner in model.modules()}
    known |= {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    usual = vars(nn.Module()).keys()
    for name, inner in model.named_modules():
        own = {key: value for key, value in vars(inner).items() if key not in usual}
        for key, value in own.items():
            hidden = [each for each in _held_in(value) if id(each) not in known]
            if any(isinstance(each, nn.Module) or each.is_meta for each in hidden):
                raise PhalanxError(
                    f"[model] class {type(model).__name__}, attribute {name}{'.' if name else ''}{key}",
                    value=f"a {type(value).__name__}",
                    expected="modules and tensors that torch knows, so that ranks can make them real",
                    remedy="modules belong into a ModuleList or ModuleDict, tensors into register_buffer(..., "
                    "persistent=False)",
                )


def _held_in(value: Any) -> Iterator[nn.Module | Tensor]:
    """Modules and tensors in a value and in the lists, tuples and dicts that it is made of."""
    if isinstance(value, nn.Module | Tensor):
        yield value
    elif isinstance(value, list | tuple | set | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _held_in(each)
