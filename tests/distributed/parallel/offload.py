"""Ranks that train the same steps with and without CPU offload, and compare every bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from parity import gradient_norm, layout_of, make_job, slot_batch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.parallel import ParallelModel, build_mesh, multiple_of
from phalanx.spec import Job
from phalanx.trainer.optimizer import Optimizer

NUM_STEPS = 3


def run_offload(context: RankContext) -> None:
    """Entry of the ranks: for each of `cases`, whether all that was learnt and measured is the same bits, on this rank,
    and whether torch was told to offload where the job says so, and only there.
    """
    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    for name, case in context.arguments["cases"].items():
        job = make_job(case | {"world_size": context.world_size})
        offloading = job.model_copy(update={"parallel": job.parallel.model_copy(update={"cpu_offload": True})})
        (kept, kept_on_host), (moved, moved_to_host) = (
            _trained(each, context.world_size) for each in (job, offloading)
        )
        row = {
            "same": all(torch.equal(a, b) for a, b in zip(kept, moved, strict=True)),
            "num_tensors": len(moved),
            "changed": not torch.equal(kept[0], kept[1]),
            "told": (kept_on_host, moved_to_host),
        }
        context.report("result", **{name: row})
    dist.destroy_process_group()


def _trained(job: Job, world_size: int) -> tuple[list[torch.Tensor], bool]:
    """Losses [steps x 2], norms, parameters and moments after some clipped updates, and whether torch offloads."""
    layout = layout_of(job, world_size)
    mesh = build_mesh(layout, "cpu", schedule=job.parallel.schedule)
    model = ParallelModel(job, layout, mesh, "cpu")
    optimizer = Optimizer(job, model.parameters())
    divisor = multiple_of(job.parallel.schedule, layout.pp)
    vocab_size = job.model.decoder.vocab_size
    batch, valid_tokens = slot_batch(mesh.dp_rank, mesh.dp_size, job.parallel.local_batch_size, divisor, vocab_size)
    first = torch.cat([held.local.flatten() for held in model.parameters()]).clone()
    told: list[Any] = []
    for _ in range(NUM_STEPS):
        told += [model.evaluate(batch, valid_tokens), model.forward_backward(batch, valid_tokens)]
        model.finish_gradients()
        norm = gradient_norm(model)
        told.append(torch.tensor(norm))
        optimizer.update(model.gradients(), norm, 1.0)
        model.zero_gradients()
    last = torch.cat([held.local.flatten() for held in model.parameters()])
    moments = torch.cat([held.local.flatten() for held in optimizer.state()])
    return [first, last, moments, torch.stack(told)], all(_offloads(stage) for stage in model.stages)


def _offloads(stage: torch.nn.Module) -> bool:
    """A stage that is kept whole was not given to torch's fully_shard at all."""
    sharded = [inner for inner in (stage, *stage.layers.values()) if isinstance(inner, FSDPModule)]
    groups = [fully_shard.state(inner)._fsdp_param_group for inner in sharded]
    found = {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups if group is not None}
    assert len(found) == 1 or not sharded, "all blocks alike"
    return any(found)
