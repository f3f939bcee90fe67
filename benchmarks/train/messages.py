"""The messages of one step of the demo on 8 ranks, and what the step takes, of one source tree or of several in turns.

Prints for each tree, of a rank of the first and of one of the last stage: calls a step by kind and size, in elements,
and the time in which the backend was at it; and over all rounds seconds of the median step and of the processor.

OMP_NUM_THREADS=1 python benchmarks/train/messages.py FOLDER [--trees TREE ...] [--rounds 3] [--steps 12]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traced import ranks

HERE = Path(__file__).parent
JOB = HERE.parents[1] / "examples" / "demo.toml"
WORLD_SIZE, WARM_UP, PROFILED = 8, 3, 2
KINDS = {
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::send": ("send", 0),
}


def one(folder: Path, steps: int) -> None:
    """A run of this tree; prints what came out as one line of JSON."""
    job = tomllib.loads(JOB.read_text())
    del job["checkpoint"]
    found = ranks(WORLD_SIZE, {"job": job, "steps": steps, "profiled": PROFILED, "traces": str(folder)})
    print(
        json.dumps(
            {
                "step_s": statistics.median(found[0]["seconds"][WARM_UP:]),
                "processor_s": statistics.median(
                    sum(each) for each in zip(*(r["processor_s"][WARM_UP:] for r in found), strict=True)
                ),
                "loss": sum(each["loss"] for each in found) / len(found),
            }
        )
    )


def calls(trace: bytes) -> dict[tuple[str, int], float]:
    """Calls a step by kind and elements of what this rank gives."""
    found: dict[tuple[str, int], float] = defaultdict(float)
    for event in json.loads(trace)["traceEvents"]:
        if event.get("ph") == "X" and event["name"] in KINDS:
            kind, place = KINDS[event["name"]]
            shape: Any = event["args"]["Input Dims"][place]
            while shape and isinstance(shape[0], list):
                shape = shape[0]
            found[kind, math.prod(shape)] += 1 / PROFILED
    return dict(found)


def told(name: str, rank: int, trace: bytes) -> str:
    """A table of one rank's messages."""
    from phalanx.telemetry.trace import timeline, total  # an older tree, whose ranks run this file too, has none

    by_kind = timeline(trace).by_kind
    lines = [f"{name}, rank {rank}: calls a step"]
    for (kind, size), count in sorted(calls(trace).items()):
        lines.append(f"  {kind:15} {size:>9} elements  {count:5.0f}")
    for kind, spans in sorted(by_kind.items()):
        if kind not in ("gloo:send", "gloo:recv"):  # which last until somebody asks for them
            lines.append(f"  {kind:24} {total(spans) / PROFILED / 1e3:7.1f} ms")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trees", type=Path, nargs="+", default=[HERE.parents[1]])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.one:
        one(options.folder, options.steps)
        return
    found: dict[Path, list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for number, tree in enumerate(options.trees):
            folder = options.folder / str(number)
            command = [sys.executable, __file__, str(folder), "--one", "--steps", str(options.steps)]
            path = os.pathsep.join([str(tree / "libs"), str(tree / "services")])
            done = subprocess.run(
                command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=900, check=True
            )
            found[tree].append(json.loads(done.stdout.splitlines()[-1]))
            print(tree.name, found[tree][-1], f"load {os.getloadavg()[0]:.1f}", flush=True)
    for number, (tree, rounds) in enumerate(found.items()):
        for rank in (0, WORLD_SIZE - 1):
            print(told(tree.name, rank, (options.folder / str(number) / f"r{rank}.json").read_bytes()))
        for key in ("step_s", "processor_s"):
            values = [each[key] for each in rounds]
            print(f"{tree.name}: {key} {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
