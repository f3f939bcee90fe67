"""From a job to a module on the meta device: the built-in decoder, or the user's class with the methods that its layout
needs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.models.experts import stored_shapes
from phalanx.models.own import calling_own, own_object
from phalanx.models.protocol import (
    HasContext,
    HasHead,
    HasParallelPlan,
    HasStages,
)
from phalanx.parallel.own_model import check_state
from phalanx.spec import Job
from phalanx.spec.layout import window_parts
from phalanx.spec.unbuilt import refuse_unbuilt_model

logger = logging.getLogger(__name__)


def build_on_meta(job: Job) -> nn.Module:
    """The job's whole model on the meta device: shapes and names, no memory. Parameters are fp32, as masters are,
    whatever float type their class gives them; buffers keep theirs.
    """
    with torch.device("meta"):
        model = build(job)
    for parameter in model.parameters():
        if not is_lazy(parameter) and parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model


def build(job: Job) -> nn.Module:
    """The job's whole model on the default device, with whatever weights its class gives it."""
    if isinstance(job.model.args, dict):
        assert job.model.class_ is not None, "only a class has arguments of its own"
        return _built(job.model.class_, job.model.args)
    args = job.model.args
    refuse_unbuilt_model(args)
    return Decoder(DecoderArgs.of(args), job.model.attn_backend)


def _built(path: str, args: Mapping[str, Any]) -> nn.Module:
    kind = user_class(path)
    try:
        inspect.signature(kind).bind(**args)
    except TypeError as error:
        raise PhalanxError(
            "[model.args]",
            value=dict(args),
            expected=f"the arguments of {kind.__name__}{inspect.signature(kind)}",
            remedy=f"correct them: {error}",
        ) from error
    with calling_own("[model] class", "a class whose __init__ takes [model.args] as they are", path):
        model = kind(**args)
    if not any(parameter.requires_grad for parameter in _parameters_of(model)):
        raise PhalanxError(
            "[model] class", value=path, expected="a module with a parameter that trains", remedy="give it one"
        )
    return model


def _parameters_of(model: nn.Module) -> list[nn.Parameter]:
    with calling_own("[model] class", "an __init__ that calls super().__init__() first", type(model).__name__):
        return list(model.parameters())


def user_class(path: str) -> type[nn.Module]:
    """The class that `[model] class` names. Raises PhalanxError where it cannot be imported or is no Module."""
    found = own_object("[model] class", path)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise PhalanxError(
            "[model] class", value=path, expected="a torch.nn.Module", remedy="name a class derived from it"
        )
    return found


def check_layout(model: nn.Module, sizes: Mapping[str, int], seq_len: int) -> None:
    """PhalanxError where the model lacks what the axis sizes need, naming the missing method, or has state that no
    checkpoint would hold.
    """
    check_state(model)
    needs = (
        ("tp", HasParallelPlan, "parallel_plan()"),
        ("pp", HasStages, "split_stages(num_stages)"),
        ("cp", HasContext, "set_context(context)"),
    )
    for axis, protocol, method in needs:
        if sizes[axis] > 1 and not isinstance(model, protocol):
            raise PhalanxError(
                f"[parallel] {axis}",
                value=sizes[axis],
                expected=f"1, because {type(model).__name__} has no {method}",
                remedy=f"add the method (see phalanx.models.protocol) or set {axis} = 1",
            )
    if seq_len % (parts := window_parts(sizes["cp"], sizes["tp"])):
        raise PhalanxError(
            "[training] seq_len",
            value=seq_len,
            expected=f"a multiple of {parts}, as tp is {sizes['tp']} and cp {sizes['cp']}",
            remedy="change one of them",
        )
    if isinstance(model, Decoder) and model.args.n_heads % sizes["tp"]:
        raise PhalanxError(
            "[parallel] tp",
            value=sizes["tp"],
            expected=f"a divisor of n_heads ({model.args.n_heads})",
            remedy="change tp or [model.args] n_heads",
        )


def check_head(model: nn.Module, chunk_tokens: int) -> None:
    """PhalanxError where a loss by chunks of tokens needs a head that the model does not give."""
    if not chunk_tokens:
        return
    if not isinstance(model, HasHead):
        raise PhalanxError(
            "[loss] chunk_tokens",
            value=chunk_tokens,
            expected=f"0, because {type(model).__name__} has no detach_head()",
            remedy="add the method and `head` (see phalanx.models.protocol.HasHead) or set 0",
        )
    if not isinstance(model.head, nn.Linear) or model.head.bias is not None:
        raise PhalanxError(
            "[loss] chunk_tokens",
            value=chunk_tokens,
            expected=f"0, because `head` of {type(model).__name__} is no Linear without a bias",
            remedy="give the head no bias or set 0",
        )


def whole_weights(job: Job, device: torch.device) -> dict[str, Tensor]:
    """Parameters, whole, of a user's model that gives no `initial_weights`: those of rank 0, sent to all.

    Every rank holds the whole for a moment; the size is logged.
    """
    model = _build_seeded(job)
    tensors = dict(model.named_parameters())
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    logger.info("%s is initialised whole on one process: %.1f MiB", type(model).__name__, num_bytes / 2**20)
    return _sent(tensors, device)


def whole_buffers(job: Job, device: torch.device) -> dict[str, Tensor]:
    """Buffers, whole, as `__init__` makes them: those of rank 0, sent to all. Parameters are dropped as they are made,
    so that no process holds the model.
    """
    hook = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]  # it may return another
    try:
        buffers = dict(_build_seeded(job).named_buffers(remove_duplicate=False))
    finally:
        hook.remove()
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise PhalanxError(
                f"[model] class, buffer {name}",
                expected="a buffer that __init__ computes from its arguments, not from parameters",
                remedy="compute it in forward",
            )
    return _sent(buffers, device)


def _to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter:
    """A parameter that is registered again (a tied one) stays the same."""
    if parameter is None or parameter.is_meta:
        return parameter
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _build_seeded(job: Job) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(job.training.seed)
        return build(job)


def _sent(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Rank 0's values on every rank, on `device`."""
    whole = {name: tensor.detach().to(device) for name, tensor in tensors.items()}
    for tensor in whole.values():
        dist.broadcast(tensor, src=0)
    return whole


def parameter_names(job: Job) -> tuple[str, ...]:
    """Canonical names of all parameters of the job's whole model, tied ones once, stacked experts one by one."""
    return tuple(parameter_shapes(job))


def parameter_shapes(job: Job) -> dict[str, tuple[int, ...]]:
    """As `parameter_names`, with the shape of each."""
    return stored_shapes(build_on_meta(job))


def count_parameters(job: Job) -> int:
    """Parameters of the job's whole model, tied ones once; no memory is taken."""
    return sum(parameter.numel() for parameter in build_on_meta(job).parameters())
