"""The pipeline simulator against the trainer's own pipeline, step for step, and against published bubbles.

python benchmarks/planner/bubble.py [--slower FACTOR] [--steps NUMBER] [--alike] [--page FILE.md] [--rows FILE.json]

Four gloo ranks run every schedule through the trainer's pipeline (torch's runtime under it) with stages that sleep for
set times in forward and in both halves of backward, so that the ranks of one machine don't compete for its cores: what
is measured is the order, the waiting and the hops. --slower: longer sleeps, for a machine that is busy with other
things, where waking up takes long. --alike: forward and both halves of backward take the same, for which the papers'
formulas are exact. --page: a Markdown file whose table of bubbles is written anew. --rows: published rows of category
`bubble` ({"rows": [{"category", "model", "parallel", "measured"}]}) to compare with, beside that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from phalanx.core.files import write_output
from phalanx.parallel.clock import StepClock
from phalanx.planner.bubble_formulas import bubble_by_formula
from phalanx.planner.pipeline import StageCosts, simulate

RANKS, MICRO_BATCHES = 4, 8
# Seconds of a whole rank's layers: a forward, and the halves of its backward.
PARTS_S, PARTS_ALIKE_S = (0.040, 0.048, 0.032), (0.040, 0.040, 0.040)
BEGIN, END = "<!-- bubbles: begin -->", "<!-- bubbles: end -->"
SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("looped_bfs", 2),
    ("interleaved_zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
)
DEADLINE_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--alike", action="store_true")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.store, options.steps, options.slower, alike=options.alike)
        return
    table = compare_with_trainer(options.steps, options.slower, alike=options.alike)
    print(table)
    if options.page is not None:
        before, rest = options.page.read_text().split(BEGIN)
        write_output(options.page, f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}".encode())
    if options.rows is not None:
        compare_with_rows(json.loads(options.rows.read_text())["rows"])


def parts_of(slower: float, *, alike: bool) -> list[float]:
    return [seconds * slower for seconds in (PARTS_ALIKE_S if alike else PARTS_S)]


def compare_with_trainer(steps: int, slower: float, *, alike: bool) -> str:
    """A Markdown table, a line a schedule."""
    with tempfile.TemporaryDirectory() as folder:
        told = ["--steps", str(steps), "--slower", str(slower), "--store", f"{folder}/store"]
        command = [sys.executable, __file__, *told, *(["--alike"] if alike else []), "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
            for rank in range(RANKS)
        ]
        try:
            said = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    measured = json.loads(said[0])
    parts = parts_of(slower, alike=alike)
    lines = [
        f"{RANKS} ranks, {MICRO_BATCHES} micro-batches, forward {parts[0]:.3f} s, backward {parts[1]:.3f} s for inputs "
        f"and {parts[2]:.3f} s for weights; median of {steps} steps of the trainer's pipeline.",
        "",
        "| schedule | step, s | simulated, s | off | bubble measured | by formula | simulated |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    work_s = MICRO_BATCHES * sum(parts)
    for schedule, per_rank in SCHEDULES:
        run = simulate(schedule, RANKS, per_rank, MICRO_BATCHES, costs_of(per_rank, parts))
        step_s, idle_s = measured[schedule], bubble_by_formula(schedule, RANKS, per_rank, *parts)
        lines.append(
            f"| {schedule} | {step_s:.3f} | {run.makespan_s:.3f} | {run.makespan_s / step_s - 1:+.1%} "
            f"| {1 - work_s / step_s:.1%} | {idle_s / (work_s + idle_s):.1%} | {run.bubble_fraction:.1%} |"
        )
    return "\n".join(lines)


def costs_of(per_rank: int, parts: list[float]) -> StageCosts:
    even = StageCosts.even(RANKS * per_rank, *(seconds / per_rank for seconds in parts))
    return StageCosts(even.forward_s, even.input_s, even.weight_s, first_is_whole=True)


def run_rank(rank: int, store: Path, steps: int, slower: float, *, alike: bool) -> None:
    """Every schedule on one rank; rank 0 prints {schedule: seconds of a step}."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    parts = parts_of(slower, alike=alike)
    found = {schedule: step_seconds(schedule, per_rank, rank, steps, parts) for schedule, per_rank in SCHEDULES}
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


def step_seconds(schedule: str, per_rank: int, rank: int, steps: int, parts: list[float]) -> float:
    import torch
    import torch.distributed as dist

    from phalanx.parallel.mesh import build_mesh
    from phalanx.parallel.pipeline import Pipeline, StageShapes
    from phalanx.parallel.schedules import stages_of
    from phalanx.parallel.slots import SlotBatch
    from phalanx.spec import Layout

    num_stages, shape = RANKS * per_rank, (1, 2)
    mesh = build_mesh(Layout(pp=RANKS), "cpu", schedule=schedule)
    shapes = [StageShapes(shape, shape, torch.float32) for _ in range(num_stages)]
    indices = stages_of(schedule, RANKS, rank, per_rank)
    pace = {"share": 0.0}  # the first step, which connects the ranks, does not sleep
    modules = [sleeping_stage(*(seconds / per_rank for seconds in parts), pace) for _ in indices]
    clock = StepClock(torch.device("cpu"))
    pipeline = Pipeline(modules, indices, shapes, mesh, lambda output, target, valid_tokens: output.sum(), clock)
    tokens = torch.zeros((MICRO_BATCHES, 2), dtype=torch.int64)
    batch = SlotBatch(tokens, tokens, tokens, None, MICRO_BATCHES)
    taken = []
    for _ in range(steps + 1):
        dist.barrier()
        started = time.monotonic()
        pipeline.step(batch, 1)
        dist.barrier()
        taken.append(time.monotonic() - started)
        pace["share"] = 1.0
    return statistics.median(taken[1:])


def sleeping_stage(forward_s: float, input_s: float, weight_s: float, pace: dict[str, float]) -> Any:
    """A module that sleeps in its forward, in the gradient of its input and in that of its weight."""
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            time.sleep(ctx.seconds * pace["share"])
            return gradient, None

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, value: torch.Tensor, **_: Any) -> torch.Tensor:
            time.sleep(forward_s * pace["share"])
            if not value.dtype.is_floating_point:
                # The first stage has no gradient of its input: its two halves come together.
                return value * Sleep.apply(self.weight, input_s + weight_s)
            return Sleep.apply(value, input_s) * Sleep.apply(self.weight, weight_s)

    return Stage()


# Published names by those of the trainer: (schedule, stages a rank). ZB-1p and ZB-H1 are the interleaved zero bubble of
# one stage a rank.
PUBLISHED = {
    "1F1B": ("1f1b", 1),
    "1F1B-I": ("interleaved_1f1b", 0),
    "ZB-H1": ("interleaved_zero_bubble", 1),
    "ZB-1p": ("interleaved_zero_bubble", 1),
}


def compare_with_rows(rows: list[dict[str, Any]]) -> None:
    """Published bubbles of schedules that the trainer has, simulated with forward, inputs and weights as 4 : 4 : 2."""
    errors = []
    for row in rows:
        parallel = row.get("parallel", {})
        if row.get("category") != "bubble" or parallel.get("schedule") not in PUBLISHED:
            continue
        schedule, per_rank = PUBLISHED[parallel["schedule"]]
        pp = parallel["pp"]
        # One layer a stage, embedding and head counting as one each.
        per_rank = per_rank or (row["model"]["layers"] + 2) // pp
        costs = StageCosts.even(pp * per_rank, 0.4, 0.4, 0.2, p2p_s=0.0)
        run = simulate(schedule, pp, per_rank, parallel["microbatches"], costs)
        errors.append(run.bubble_fraction - row["measured"]["bubble_rate"])
        print(
            f"{parallel['schedule']:7} pp {pp:3} {parallel['microbatches']:4} micro-batches: "
            f"published {row['measured']['bubble_rate']:.4f}, simulated {run.bubble_fraction:.4f}"
        )
    if not errors:
        print("no rows of category bubble: nothing compared")
        return
    print(f"{len(errors)} rows: mean error {statistics.fmean(errors):+.4f}, largest {max(map(abs, errors)):.4f}")


if __name__ == "__main__":
    main()
