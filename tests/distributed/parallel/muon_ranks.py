"""Ranks of the Muon table: every layout is given the same gradients and compared box by box with one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from parity import layout_of, make_job
from safetensors.torch import load_file
from torch import Tensor

from phalanx.core.box import HeldTensor, whole
from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.parallel import ParallelModel, build_mesh
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job
from phalanx.trainer.optimizer import Optimizer, optimizer_of

STEPS, RESTORED_AT = 3, 2


def muon_job(case: Mapping[str, Any]) -> Job:
    job = make_job(case)
    changed = {"name": "muon", "lr": 0.02}
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update=changed)})


def drawn(name: str, shape: Sequence[int], step: int) -> Tensor:
    """A gradient, or at step 0 the weights."""
    seed = sum(index * ord(letter) for index, letter in enumerate(name, 1)) + 1_000_003 * step
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def gradients(held: Sequence[HeldTensor], step: int) -> list[Tensor | None]:
    return [drawn(h.name, h.global_shape, step)[whole(h.global_shape).slices_of(h.box)].clone() for h in held]


def run_steps(optimizer: Optimizer, held: Sequence[HeldTensor], steps: range) -> None:
    for step in steps:
        optimizer.update(gradients(held, step), 10.0, 1.0)


def run_layouts(context: RankContext) -> None:
    """Entry of the ranks: by case, what differs from the reference after all steps, from the start and from the state
    that one process had at `RESTORED_AT`.
    """
    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    references = {step: load_file(path) for step, path in context.arguments["references"].items()}
    for name, case in context.arguments["cases"].items():
        job = muon_job(case | {"world_size": context.world_size})
        layout = layout_of(job, context.world_size)
        mesh = build_mesh(layout, "cpu", schedule=job.parallel.schedule)
        model = ParallelModel(job, layout, mesh, "cpu")
        found = []
        for start in (0, RESTORED_AT):
            optimizer = optimizer_of(job, model.parameters(), ReplicaLink(None), mesh)
            _load([*model.parameters(), *optimizer.state()], references[str(start)])
            optimizer.resume({"num_updates": start})
            run_steps(optimizer, model.parameters(), range(start + 1, STEPS + 1))
            found.append(_different([*model.parameters(), *optimizer.state()], references[str(STEPS)]))
        everyone: list[Any] = [None] * context.world_size
        dist.all_gather_object(everyone, found)
        context.report(
            "result", **{name: [sorted(set(itertools.chain(*each))) for each in zip(*everyone, strict=True)]}
        )
    dist.destroy_process_group()


def _load(tensors: Sequence[HeldTensor], reference: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for held in tensors:
            held.local.copy_(reference[held.name][whole(held.global_shape).slices_of(held.box)])


def _different(tensors: Sequence[HeldTensor], reference: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors whose bits are others in a hidden matrix, or that are off by more than rounding elsewhere."""
    names = []
    for held in tensors:
        expected = reference[held.name][whole(held.global_shape).slices_of(held.box)]
        is_exact = "layers." in held.name and len(held.global_shape) == 2
        same = torch.equal if is_exact else lambda a, b: torch.allclose(a, b, rtol=1e-6, atol=1e-7)
        if not same(held.local.detach(), expected):
            names.append(held.name)
    return names
