"""The planner's memory of a rank against what the trainer allocates: one rank, on a CPU, every allocation of torch's
allocator from the building of the model through two steps with the optimizer.

python -m benchmarks.planner.memory

In fp32: on a CPU the trainer's bf16 products are computed in fp32, whose copies no GPU has.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from phalanx.parallel import ParallelModel, SlotBatch, build_mesh
from phalanx.parallel.replicas import ReplicaLink
from phalanx.planner import rank_memory
from phalanx.planner.job_search import model_shape, run_shape
from phalanx.spec import Job, parse_job
from phalanx.trainer.optimizer import optimizer_of

SEQ_LEN, NUM_WINDOWS = 128, 4
MODEL = {"dim": 128, "n_layers": 12, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 352, "vocab_size": 512}
# Keys of [parallel], then mode and `every` of [activation_checkpoint].
CASES: Mapping[str, tuple[Any, ...]] = {
    "zero 1, four micro-batches": ({"zero": 1}, "none"),
    "zero 1, one micro-batch": ({"zero": 1, "local_batch_size": 4}, "none"),
    "zero 2": ({"zero": 2}, "none"),
    "zero 3": ({"zero": 3}, "none"),
    "zero 3, one micro-batch": ({"zero": 3, "local_batch_size": 4}, "none"),
    "zero 3, recompute": ({"zero": 3, "local_batch_size": 4}, "full"),
    "zero 3, every third": ({"zero": 3, "local_batch_size": 4}, "full", 3),
    "zero 3, selective": ({"zero": 3, "local_batch_size": 4}, "selective"),
    "zero 3, selective, every other": ({"zero": 3, "local_batch_size": 4}, "selective", 2),
}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        for name, case in CASES.items():
            job = make_job(*case)
            (planned,) = rank_memory(model_shape(job), job.layout(1), run_shape(job), runtime_bytes=0)
            found = peak(job)
            print(f"{name:31} allocated {found:12,}  planned {planned.total_bytes:12,}  ", end="")
            print(f"{planned.total_bytes / found - 1:+.1%}", flush=True)
        dist.destroy_process_group()


def make_job(parallel: Mapping[str, Any], recompute: str, every: int = 1) -> Job:
    """A job on one rank."""
    training = {"seq_len": SEQ_LEN, "steps": 1, "global_batch_size": NUM_WINDOWS, "seed": 1}
    return parse_job(
        {
            "job": {"name": "memory", "storage": "memory://memory"},
            "model": {"args": MODEL},
            "data": {"train": "memory://memory/train"},
            "training": training | {"mixed_precision_param": "float32"},
            "optimizer": {"lr": 1e-3},
            "parallel": parallel,
            "activation_checkpoint": {"mode": recompute, "every": every},
            "cluster": {"nproc": 1},
        }
    )


def peak(job: Job) -> int:
    """Most bytes that were allocated at once."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _train(job)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    gc.collect()
    return max(itertools.accumulate(change for _, change in changes))


def _train(job: Job) -> None:
    layout = job.layout(1)
    model = ParallelModel(job, layout, build_mesh(layout, "cpu", schedule=job.parallel.schedule), "cpu")
    optimizer = optimizer_of(job, model.parameters(), ReplicaLink(None))
    tokens = torch.zeros(NUM_WINDOWS, SEQ_LEN, dtype=torch.long)
    positions = torch.arange(SEQ_LEN).expand_as(tokens)
    slots = NUM_WINDOWS // job.parallel.local_batch_size
    batch = SlotBatch(tokens, tokens, positions, tokens, num_slots=slots)
    for _ in range(2):
        model.zero_gradients()
        model.forward_backward(batch, NUM_WINDOWS * SEQ_LEN)
        model.finish_gradients()
        optimizer.update(model.gradients(), 1.0, 1.0)


if __name__ == "__main__":
    main()
