"""The state dict that a program gives, looked at before anything of it is planned, staged, read or written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._traverse import OBJ_PATH, traverse_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from phalanx.core.errors import PhalanxError, Problems
from phalanx.snapshot.dcp.values import Values, encode
from phalanx.snapshot.dtypes import DTYPES

_METADATA: Final = "__metadata__"


def require_dict(state_dict: object) -> None:
    """Raises PhalanxError for anything but a dict."""
    if not isinstance(state_dict, Mapping):
        raise PhalanxError(
            "state dict",
            value=f"a {type(state_dict).__name__}",
            expected="a dict of tensors and values, modules and optimizers by name",
            remedy='give it a name: {"model": ...}',
        )


def require_storable(state_dict: Mapping[str, Any]) -> None:
    """Raises Problems that name every tensor and value that no checkpoint can hold, and every two values whose places
    have the same name.
    """
    leaves, problems = _leaves(state_dict)
    for name, value in leaves.items():
        if isinstance(value, torch.Tensor):
            problems.extend(_of_tensor(name, value))
    plain = {name: value for name, value in leaves.items() if not _is_of_torch(value)}
    try:
        encode(Values(plain, {}))
    except Problems as error:
        problems.extend(error.problems)
    if problems:
        raise Problems("state dict", problems)


def require_fillable(state_dict: Mapping[str, Any]) -> None:
    """As `require_storable`, of the tensors of a state dict that is loaded into; whether they have the types of the
    checkpoint is not asked here. In a process group torch makes memory for tensors on the meta device first, so there
    they are let be.
    """
    may_be_meta = dist.is_available() and dist.is_initialized()
    leaves, problems = _leaves(state_dict)
    for name, value in leaves.items():
        if isinstance(value, torch.Tensor):
            problems.extend(_one(tensor_problem(name, value, may_be_meta=may_be_meta)))
    if problems:
        raise Problems("state dict", problems)


def refused_type(name: str, dtype: torch.dtype) -> PhalanxError:
    """Of a tensor of a type that the format lacks."""
    return PhalanxError(
        name,
        value=str(dtype).removeprefix("torch."),
        expected=f"a tensor of one of the types {', '.join(DTYPES)}",
        remedy="convert it, or save a view of its bytes: tensor.view(torch.uint8)",
    )


def refused_layout(name: str, layout: torch.layout) -> PhalanxError:
    """Of a tensor that is sparse, or stored in another way than by strides."""
    return PhalanxError(
        name,
        value=f"a tensor of the layout {str(layout).removeprefix('torch.')}",
        expected="a dense tensor (strided)",
        remedy="convert it with tensor.to_dense(), or name the tensors it is made of",
    )


def refused_device(name: str, what: str) -> PhalanxError:
    """Of a tensor without elements in memory."""
    return PhalanxError(
        name,
        value=f"a tensor {what}",
        expected="one with elements in memory, on the CPU or an accelerator",
        remedy="materialise it (module.to_empty(device=...), a first forward), or leave it out of the state dict",
    )


def tensor_problem(name: str, value: torch.Tensor, *, may_be_meta: bool = False) -> PhalanxError | None:
    """Why a checkpoint cannot hold the elements of this tensor, its type aside; None where it can."""
    if isinstance(value, ShardedTensor):
        return None
    local = value.to_local() if isinstance(value, DTensor) else value
    if is_lazy(local):
        return refused_device(name, "that no forward has initialised")
    if isinstance(local, FakeTensor) or (local.device.type == "meta" and not may_be_meta):
        return refused_device(name, "of FakeTensorMode" if isinstance(local, FakeTensor) else "on the meta device")
    if local.is_nested or local.layout != torch.strided:
        return refused_layout(name, torch.jagged if local.is_nested else local.layout)
    return None


def name_problem(name: str) -> PhalanxError | None:
    """Why no checkpoint can hold a tensor of this name; None where it can."""
    try:
        name.encode()
    except UnicodeEncodeError:
        is_text = False
    else:
        is_text = name not in ("", _METADATA)
    if is_text:
        return None
    return PhalanxError(
        f"the name {name!r} of a tensor",
        expected=f"a text of Unicode characters, neither empty nor {_METADATA}, which safetensors keeps for itself",
        remedy="rename the key",
    )


def _leaves(state_dict: Mapping[str, Any]) -> tuple[dict[str, object], list[PhalanxError]]:
    """What torch takes for one tensor or value each, by the name that it gives; and names that it would give twice."""
    leaves: dict[str, object] = {}
    places: dict[str, OBJ_PATH] = {}
    problems: list[PhalanxError] = []

    def look(path: OBJ_PATH, value: object) -> None:
        name = ".".join(map(str, path))
        if name in places:
            problems.append(_same_name(name, places[name], path))
        leaves.setdefault(name, value)
        places.setdefault(name, path)

    try:
        traverse_state_dict(dict(state_dict), look)
    except RecursionError as error:
        raise PhalanxError(
            "state dict", expected="dicts and lists that don't hold themselves", remedy="leave those out"
        ) from error
    return leaves, problems


def _of_tensor(name: str, value: torch.Tensor) -> Iterator[PhalanxError]:
    yield from _one(name_problem(name))
    problem = tensor_problem(name, value)
    if problem is not None:
        yield problem
    elif str(value.dtype).removeprefix("torch.") not in DTYPES:
        yield refused_type(name, value.dtype)


def _is_of_torch(value: object) -> bool:
    """Whether it is written as one tensor or several."""
    return isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__")


def _one(problem: PhalanxError | None) -> Iterator[PhalanxError]:
    if problem is not None:
        yield problem


def _same_name(name: str, first: OBJ_PATH, second: OBJ_PATH) -> PhalanxError:
    return PhalanxError(
        name,
        value=f"the name of two values, at {list(first)} and {list(second)}",
        expected="one: names are the keys from the top, joined by dots",
        remedy="rename one of the keys",
    )
