"""From a job to a module on the meta device: the built-in decoder, or the user's class with the methods that its layout
needs.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.models.protocol import HasParallelPlan, HasStages

logger = logging.getLogger(__name__)


def build_on_meta(job: Any) -> nn.Module:
    """The job's whole model on the meta device: shapes and names, no memory."""
    with torch.device("meta"):
        return build(job)


def build(job: Any) -> nn.Module:
    """The job's whole model on the default device, with whatever weights its class gives it."""
    if job.model.class_ is not None:
        return _user_class(job.model.class_)(**job.model.args)
    args = job.model.args
    if getattr(args, "moe", None) is not None:
        raise PhalanxError(
            "[model.args.moe]", expected="no experts: mixture-of-experts does not train yet", remedy="leave it out"
        )
    if args.dropout > 0:
        raise PhalanxError(
            "[model.args] dropout", value=args.dropout, expected="0: dropout does not train yet", remedy="set it to 0"
        )
    return Decoder(DecoderArgs.of(args))


def _user_class(path: str) -> type[nn.Module]:
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise PhalanxError(
            "[model] class",
            value=path,
            expected="an importable package.module:Class",
            remedy=f"install it or put it on PYTHONPATH ({error})",
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise PhalanxError(
            "[model] class", value=path, expected="a torch.nn.Module", remedy="name a class derived from it"
        )
    return found


def check_layout(model: nn.Module, sizes: Mapping[str, int], seq_len: int) -> None:
    """PhalanxError where the model lacks what the axis sizes need, naming the missing method."""
    if sizes["cp"] > 1:
        raise PhalanxError("[parallel] cp", value=sizes["cp"], expected="1: no context parallelism yet", remedy="set 1")
    needs = (("tp", HasParallelPlan, "parallel_plan()"), ("pp", HasStages, "split_stages(num_stages)"))
    for axis, protocol, method in needs:
        if sizes[axis] > 1 and not isinstance(model, protocol):
            raise PhalanxError(
                f"[parallel] {axis}",
                value=sizes[axis],
                expected=f"1, because {type(model).__name__} has no {method}",
                remedy=f"add the method (see phalanx.models.protocol) or set {axis} = 1",
            )
    if seq_len % sizes["tp"]:
        raise PhalanxError(
            "[training] seq_len", value=seq_len, expected=f"a multiple of tp ({sizes['tp']})", remedy="change either"
        )
    if isinstance(model, Decoder) and model.args.n_kv_heads % sizes["tp"]:
        raise PhalanxError(
            "[parallel] tp",
            value=sizes["tp"],
            expected=f"a divisor of n_kv_heads ({model.args.n_kv_heads})",
            remedy="change tp or [model.args] n_kv_heads",
        )


def whole_weights(job: Any, device: torch.device) -> dict[str, Tensor]:
    """Parameters and buffers, whole, of a user's model that gives no `initial_weights`: made on rank 0, sent to all.

    Every rank holds the whole for a moment, on the CPU where the group allows it; the size is logged.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.training.seed)
        model = build(job)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    logger.info("%s is initialised whole on one process: %.1f MiB", type(model).__name__, num_bytes / 2**20)
    whole = {name: tensor.detach().to(device) for name, tensor in tensors.items()}
    for tensor in whole.values():
        dist.broadcast(tensor, src=0)
    return whole


def parameter_names(job: Any) -> tuple[str, ...]:
    """Canonical names of all parameters of the job's whole model, tied ones once."""
    return tuple(name for name, _ in build_on_meta(job).named_parameters())


def count_parameters(job: Any) -> int:
    """Parameters of the job's whole model, tied ones once; no memory is taken."""
    return sum(parameter.numel() for parameter in build_on_meta(job).parameters())
