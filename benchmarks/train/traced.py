"""Ranks that train a job's model on made-up windows, some steps of them under torch's profiler: what `overlap.py` and
`messages.py` look at. No storage, no data, no services: the model, its gradients, the agreement and the update.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from phalanx.gang.context import RankContext
from phalanx.gang.fork_server import ForkServer
from phalanx.gang.rendezvous import init_process_group
from phalanx.gang.testing import TEST_PRELOAD, run_gang
from phalanx.parallel import ParallelModel, SlotBatch, build_mesh, multiple_of
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job, parse_job
from phalanx.trainer.optimizer import optimizer_of

DEADLINE_S = 300.0


def batch_of(job: Job, dp_size: int, pp: int, seed: int) -> tuple[SlotBatch, int]:
    """One rank's part of a made-up batch, and the number of tokens in all of it."""
    local, length = job.parallel.local_batch_size, job.training.seq_len
    divisor = multiple_of(job.parallel.schedule, pp)
    slots = -(-job.training.global_batch_size // (dp_size * local * divisor)) * divisor
    drawn = torch.randint(
        0, job.model.decoder.vocab_size, (slots * local, length + 1), generator=torch.Generator().manual_seed(seed)
    )
    positions = torch.arange(length).expand(slots * local, -1)
    batch = SlotBatch(
        drawn[:, :-1].clone(), drawn[:, 1:].clone(), positions, torch.zeros_like(positions), num_slots=slots
    )
    return batch, slots * local * dp_size * length


def run_steps(context: RankContext) -> None:
    """Entry of the ranks: seconds of each step that is not profiled, its parts, and the loss of the last one.

    arguments: `job`; `model`, more arguments of the model; `steps`; `profiled`, how many follow under the profiler;
    `traces`, where each rank then writes `r<rank>.json`.
    """
    torch.set_num_threads(1)
    init_process_group(context, 120.0)
    asked = context.arguments
    job = parse_job(asked["job"])
    layout = job.layout(context.world_size)
    mesh = build_mesh(layout, "cpu", schedule=job.parallel.schedule)
    model = ParallelModel(job, layout, mesh, "cpu", **asked.get("model", {}))
    optimizer = optimizer_of(job, model.parameters(), ReplicaLink(None))
    batch, valid_tokens = batch_of(job, mesh.dp_size, layout.pp, mesh.dp_rank)

    def step() -> float:
        loss = model.forward_backward(batch, valid_tokens)
        model.finish_gradients()
        gradients = model.gradients()
        word = torch.stack((loss.detach(), model.gradient_square_sum(gradients)))
        dist.all_reduce(word)
        total, square = word.tolist()
        optimizer.update(gradients, square**0.5, 1.0)
        gradients.clear()
        model.zero_gradients()
        return float(total)

    seconds, processor = [], []
    with model.clock.counting_waits():
        model.clock.start()
        for _ in range(asked["steps"]):
            began, used = time.perf_counter(), time.process_time()
            loss = step()
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
            model.clock.end_step()
        if asked["profiled"]:
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
                for number in range(asked["profiled"]):
                    with record_function(f"step {number + 1}"):
                        loss = step()
            profiler.export_chrome_trace(str(Path(asked["traces"]) / f"r{context.rank}.json"))
    context.report("result", seconds=seconds, processor_s=processor, loss=loss)
    dist.barrier()
    dist.destroy_process_group()


def ranks(world_size: int, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each rank of a new gang reports."""

    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with ForkServer(TEST_PRELOAD, {"PYTHONPATH": path}) as server:
        return run_gang(server, world_size, "traced:run_steps", arguments, timeout_s=DEADLINE_S)
