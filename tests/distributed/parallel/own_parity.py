"""Ranks of the parity table of a user's own model with its own loss: those that `phalanx init` gives to start from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity import SEED, make_job, run_job, windows
from safetensors.torch import save_file

import phalanx.cli
from phalanx.core.box import whole
from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.parallel.initialise import fill
from phalanx.spec import Job

STARTER = Path(phalanx.cli.__file__).parent / "starters" / "custom-model"
ARGS = {"vocab_size": 96, "dim": 32, "num_layers": 4, "num_heads": 4}
Z_WEIGHT = 0.1


def make_own_job(case: Mapping[str, Any]) -> Job:
    """A job of the starter's model, loss and metric."""
    if str(STARTER) not in sys.path:
        sys.path.insert(0, str(STARTER))
    job = make_job(case)
    model = job.model.model_copy(update={"class_": "my_model.model:MyModel", "args": ARGS})
    loss = job.loss.model_copy(update={"fn": "my_model.objective:loss", "args": {"z_weight": Z_WEIGHT}})
    metrics = job.metrics.model_copy(update={"fn": {"accuracy": "my_model.objective:accuracy"}})
    return job.model_copy(update={"model": model, "loss": loss, "metrics": metrics})


def write_own_reference(path: str) -> None:
    """Weights, gradients, loss and accuracy of one fp32 process without any of Phalanx's parallelism."""
    job = make_own_job({"world_size": 1})
    from my_model.model import MyModel
    from my_model.objective import accuracy, loss

    model = MyModel(**ARGS)
    initial = model.initial_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            fill(parameter, whole(shape), shape, initial[name], SEED, name)
    tokens, targets, positions, documents = windows(ARGS["vocab_size"])
    logits, num_valid = model(tokens, positions, documents), (targets != -100).sum()
    value = loss(logits, targets, **job.loss.args) / num_valid
    value.backward()
    tensors = {"loss": value.detach(), "accuracy": accuracy(logits, targets) / num_valid}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        tensors |= {f"weight/{name}": parameter.detach(), f"gradient/{name}": parameter.grad}
    save_file(tensors, path)


def run_own_table(context: RankContext) -> None:
    """Entry of the ranks: `cases` by name, `reference`; reports one row a case."""
    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    for name, case in context.arguments["cases"].items():
        job = make_own_job(case | {"world_size": context.world_size})
        row = run_job(job, context.world_size, ARGS["vocab_size"], context.arguments["reference"])
        context.report("result", **{name: row})
    dist.destroy_process_group()
