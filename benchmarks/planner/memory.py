"""The planner's memory of a rank against what the trainer allocates, for layouts of 1 to 8 gloo ranks on CPUs.

python -m benchmarks.planner.memory [NAME ...] [--page FILE.md]

Counted is every allocation of torch's allocator in a rank, in all of its threads, from the building of the model
through two steps with the optimizer, and the pages of an optimizer state on disk, which lie outside of it: bytes of
tensors. Every rank is compared with the planner's figure of its pipeline position; a row tells of the rank that is
furthest off. --page: a Markdown file whose table is written anew.

In fp32: on a CPU the trainer's bf16 products are computed in fp32, whose copies no GPU has.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from phalanx.core.files import write_output
from phalanx.gang.context import RankContext
from phalanx.gang.fork_server import ForkServer
from phalanx.gang.rendezvous import init_process_group
from phalanx.gang.testing import TEST_PRELOAD, run_gang
from phalanx.parallel import ParallelModel, SlotBatch, build_mesh
from phalanx.parallel.replicas import ReplicaLink
from phalanx.planner import num_micro_batches, rank_memory
from phalanx.planner.job_search import model_shape, run_shape
from phalanx.spec import Job, parse_job
from phalanx.trainer.optimizer import optimizer_of
from phalanx.trainer.paged_optimizer import PagedOptimizer

SEQ_LEN = 128
MODEL = {"dim": 128, "n_layers": 12, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 352, "vocab_size": 512}
EXPERTS = {
    "ffn_dim": None,
    "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_dim": 176, "num_shared_experts": 1},
}
BEGIN, END = "<!-- memory: begin -->", "<!-- memory: end -->"
DEADLINE_S = 600.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """Ranks, keys of [parallel], tables of the job file beside it, and what differs in the model's arguments."""

    ranks: int
    parallel: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]
    model: Mapping[str, Any]
    windows: int = 4


def _case(ranks: int, windows: int = 4, model: Mapping[str, Any] | None = None, **keys: Any) -> Case:
    """Keys that are tables of a job file apart, all others of [parallel]."""
    tables = {name: keys.pop(name) for name in ("activation_checkpoint", "optimizer", "loss") if name in keys}
    return Case(ranks, keys, tables, model or {}, windows)


FULL, SELECTIVE = {"mode": "full"}, {"mode": "selective"}
CASES: Mapping[str, Case] = {
    "zero 1, four micro-batches": _case(1, zero=1),
    "zero 1, one micro-batch": _case(1, zero=1, local_batch_size=4),
    "zero 2": _case(1, zero=2),
    "zero 3": _case(1, zero=3),
    "zero 3, one micro-batch": _case(1, zero=3, local_batch_size=4),
    "zero 3, recompute": _case(1, zero=3, local_batch_size=4, activation_checkpoint=FULL),
    "zero 3, every third": _case(1, zero=3, local_batch_size=4, activation_checkpoint=FULL | {"every": 3}),
    "zero 3, selective": _case(1, zero=3, local_batch_size=4, activation_checkpoint=SELECTIVE),
    "zero 3, selective, every other": _case(
        1, zero=3, local_batch_size=4, activation_checkpoint=SELECTIVE | {"every": 2}
    ),
    "two replicas": _case(2, dp_replicate=2, dp_shard=1, zero=1),
    "dp 2, zero 1": _case(2, zero=1),
    "dp 2, zero 2": _case(2, zero=2),
    "dp 2, zero 3": _case(2, zero=3),
    "dp 4, zero 3": _case(4, zero=3, windows=8),
    "dp 2, zero 3, recompute": _case(2, zero=3, activation_checkpoint=FULL, local_batch_size=2),
    "dp 2 x 2 replicas, zero 3": _case(4, windows=8, dp_replicate=2, dp_shard=2, zero=3),
    "tp 2": _case(2, tp=2, zero=1),
    "tp 2, selective": _case(2, tp=2, zero=1, local_batch_size=4, activation_checkpoint=SELECTIVE),
    "tp 2, dp 2, zero 3": _case(4, tp=2, zero=3, local_batch_size=2),
    "cp 2": _case(2, cp=2, zero=3, local_batch_size=2),
    "cp 2, all-to-all": _case(2, cp=2, zero=3, local_batch_size=2, cp_comm_type="a2a"),
    "pp 2, gpipe": _case(2, windows=8, pp=2, zero=1, schedule="gpipe"),
    "pp 2, 1f1b": _case(2, windows=8, pp=2, zero=1, schedule="1f1b"),
    "pp 4, 1f1b": _case(4, windows=8, pp=4, zero=1, schedule="1f1b"),
    "pp 2, interleaved": _case(2, windows=8, pp=2, zero=1, schedule="interleaved_1f1b", stages_per_rank=2),
    "pp 2, looped bfs": _case(2, windows=8, pp=2, zero=1, schedule="looped_bfs", stages_per_rank=2),
    "pp 2, zbv": _case(2, windows=8, pp=2, zero=1, schedule="zbv", stages_per_rank=2),
    "pp 4, zbv": _case(4, windows=8, pp=4, zero=1, schedule="zbv", stages_per_rank=2),
    "pp 2, dualpipev": _case(2, windows=8, pp=2, zero=1, schedule="dualpipev", stages_per_rank=2),
    "pp 2, zero bubble": _case(2, windows=8, pp=2, zero=1, schedule="interleaved_zero_bubble", stages_per_rank=2),
    "pp 2, zero bubble, recompute": _case(
        2,
        windows=8,
        pp=2,
        zero=1,
        schedule="interleaved_zero_bubble",
        stages_per_rank=2,
        activation_checkpoint=FULL,
    ),
    "pp 2, 1f1b, recompute": _case(2, windows=8, pp=2, zero=1, schedule="1f1b", activation_checkpoint=FULL),
    "pp 2, tied": _case(2, windows=8, pp=2, zero=1, schedule="1f1b", model={"tie_embeddings": True}),
    "tied, zero 3": _case(2, zero=3, model={"tie_embeddings": True}),
    "experts": _case(1, zero=1, model=EXPERTS),
    "ep 2, zero 3": _case(2, ep=2, zero=3, model=EXPERTS),
    "large vocabulary": _case(2, zero=3, local_batch_size=2, model={"vocab_size": 4096}),
    "chunked loss": _case(2, zero=3, local_batch_size=2, loss={"chunk_tokens": 64}, model={"vocab_size": 4096}),
    "moments on disk": _case(2, zero=3, optimizer={"offload": "nvme", "offload_gib": 0.002}),
    "pp 2, tp 2, dp 2": _case(8, windows=8, pp=2, tp=2, zero=1, schedule="1f1b"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; all of them where none is named")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    lines = ["| layout | ranks | allocated, MiB | planned, MiB | off |", "|---|---:|---:|---:|---:|"]
    print("\n".join(lines))
    with ForkServer(TEST_PRELOAD, {"PYTHONPATH": path}) as server:
        for name in options.names or CASES:
            found = Compared.of(CASES[name], allocated(server, [name])[name])
            lines.append(
                f"| {name} | {CASES[name].ranks} | {found.allocated / MIB:.2f} | {found.planned / MIB:.2f} "
                f"| {found.off:+.1%} |"
            )
            print(lines[-1], flush=True)
    if options.page is not None:
        before, rest = options.page.read_text().split(BEGIN)
        table = "\n".join(lines)
        write_output(options.page, f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}".encode())


@dataclass(frozen=True, slots=True)
class Compared:
    """Peak bytes of the rank that is furthest off, and the planner's of its pipeline position."""

    allocated: int
    planned: int

    @property
    def off(self) -> float:
        """Relative error of the planner."""
        return self.planned / self.allocated - 1

    @staticmethod
    def of(case: Case, peaks: Sequence[tuple[int, int]]) -> Compared:
        """peaks: of every rank, its place in the pipeline and its bytes."""
        planned = planned_bytes(case)
        return max((Compared(peak, planned[place]) for place, peak in peaks), key=lambda each: abs(each.off))


def planned_bytes(case: Case) -> list[int]:
    """The planner's figure of a rank, by pipeline position."""
    job = make_job(case, "/unused")
    ranks = rank_memory(model_shape(job), job.layout(case.ranks), run_shape(job), runtime_bytes=0)
    return [rank.total_bytes for rank in ranks]


def allocated(server: ForkServer, names: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
    """Of cases of one number of ranks, measured in one gang: each rank's place in the pipeline and its peak."""
    wanted = list(names)
    (ranks,) = {CASES[name].ranks for name in wanted}
    found = run_gang(server, ranks, "benchmarks.planner.memory:run_cases", {"names": wanted}, DEADLINE_S)
    return {name: [tuple(row[name]) for row in found] for name in wanted}


def run_cases(context: RankContext) -> None:
    """Entry of the ranks: reports place and peak by the names of cases."""
    torch.set_num_threads(1)
    init_process_group(context, DEADLINE_S)
    for name in context.arguments["names"]:
        with tempfile.TemporaryDirectory() as folder:
            job = make_job(CASES[name], folder)
            context.report("result", **{name: peak(job, CASES[name].ranks)})
        dist.barrier()
    dist.destroy_process_group()


def make_job(case: Case, folder: str) -> Job:
    """The job of a case. folder: of pages on disk."""
    training = {"seq_len": SEQ_LEN, "steps": 1, "global_batch_size": case.windows, "seed": 1}
    model = MODEL | dict(case.model)
    optimizer = {"lr": 1e-3} | dict(case.tables.get("optimizer", {}))
    if "offload" in optimizer:
        optimizer["offload_folder"] = folder
    return parse_job(
        {
            "job": {"name": "memory", "storage": "memory://memory"},
            "model": {"args": {key: value for key, value in model.items() if value is not None}},
            "data": {"train": "memory://memory/train"},
            "training": training | {"mixed_precision_param": "float32"},
            "parallel": dict(case.parallel),
            "cluster": {"nproc": case.ranks},
            **case.tables,
            "optimizer": optimizer,
        }
    )


def peak(job: Job, ranks: int) -> tuple[int, int]:
    """This rank's place in the pipeline, and most bytes that were allocated at once."""
    _count_in_all_threads()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        place, beside = _train(job, ranks)
    changes = sorted(_changes(profiled), key=lambda each: each.start_time_ns)
    gc.collect()
    before = changes[0].extra_fields.total_allocated - changes[0].extra_fields.alloc_size
    return place, beside + max(each.extra_fields.total_allocated for each in changes) - before


def _count_in_all_threads() -> None:
    """Torch's count of allocated bytes is of the whole process from here on.

    Else it is of the threads that are profiled, and a buffer whose last holder is a thread of gloo is never let go of.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _changes(profiled: profile) -> Iterator[Any]:
    """Events of allocations and releases, in no order."""
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None, "it has run"
    stack = list(profiled.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if hasattr(event.extra_fields, "total_allocated"):
            yield event


def _train(job: Job, ranks: int) -> tuple[int, int]:
    """The place in the pipeline, and bytes of pages that torch's allocator does not know of."""
    layout = job.layout(ranks)
    mesh = build_mesh(layout, "cpu", schedule=job.parallel.schedule)
    model = ParallelModel(job, layout, mesh, "cpu")
    optimizer = optimizer_of(job, model.parameters(), ReplicaLink(None))
    slots = num_micro_batches(layout, run_shape(job))
    windows = slots * job.parallel.local_batch_size
    generator = torch.Generator().manual_seed(mesh.dp_rank)
    vocab_size = job.model.decoder.vocab_size
    tokens = torch.randint(0, vocab_size, (windows, SEQ_LEN), generator=generator)
    positions = torch.arange(SEQ_LEN).expand_as(tokens)
    batch = SlotBatch(tokens, tokens, positions, torch.zeros_like(tokens), num_slots=slots)
    for _ in range(2):
        model.zero_gradients()
        model.forward_backward(batch, job.training.global_batch_size * SEQ_LEN)
        model.finish_gradients()
        optimizer.update(model.gradients(), 1.0, 1.0)
    beside = optimizer.pages.memory_bytes if isinstance(optimizer, PagedOptimizer) else 0
    return mesh.coordinates["pp"], beside


if __name__ == "__main__":
    main()
