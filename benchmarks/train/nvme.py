"""What optimizer state on a local disk costs: seconds of an update with the moments in memory, and in pages of a file
in FOLDER with a tenth of that memory; beside them what the disk gives to plain reads and writes of the same sizes.

A process each, in turns, of which the median counts. Parameters and gradients lie in memory on both sides; the update
is the trainer's own (fused AdamW). The first update of a file is not counted: blocks that were never written are not
read from the disk.

OMP_NUM_THREADS=2 python benchmarks/train/nvme.py FOLDER [--parameters 33554432] [--updates 5] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from corpus import machine

from phalanx.core.box import HeldTensor, whole
from phalanx.paging.file import PageFile
from phalanx.parallel.replicas import ReplicaLink
from phalanx.planner.memory import DISK_SLOTS, MOMENT_BYTES
from phalanx.spec import Job, parse_job
from phalanx.trainer.optimizer import optimizer_of

MIB = 1 << 20
COLUMNS, SHARE = 4096, 10
DEADLINE_S = 900.0


def job_of(folder: Path, budget_bytes: int, *, on_disk: bool) -> Job:
    """Only its optimizer counts."""
    paged = {"offload": "nvme", "offload_folder": str(folder), "offload_gib": budget_bytes / (MIB << 10)}
    return parse_job(
        {
            "job": {"name": "nvme", "storage": "memory://nvme"},
            "model": {"preset": "tiny"},
            "data": {"train": "memory://nvme/train"},
            "training": {"seq_len": 8, "steps": 1, "global_batch_size": 1},
            "optimizer": {"lr": 1e-4, **(paged if on_disk else {})},
        }
    )


def seconds_of(act: Callable[[], object], count: int) -> float:
    """The median of `count` calls behind a first one."""
    found = []
    for _ in range(count + 1):
        started = time.perf_counter()
        act()
        found.append(time.perf_counter() - started)
    return median(found[1:])


def update_s(folder: Path, num_parameters: int, updates: int, *, on_disk: bool) -> float:
    """Seconds of an update of this process."""
    shape = (num_parameters // COLUMNS, COLUMNS)
    held = [HeldTensor("weight", shape, whole(shape), torch.randn(shape))]
    budget_bytes = MOMENT_BYTES * num_parameters // SHARE
    optimizer = optimizer_of(job_of(folder, budget_bytes, on_disk=on_disk), held, ReplicaLink(None))
    gradient = torch.randn(shape) * 1e-3
    return seconds_of(lambda: optimizer.update([gradient], 1.0, 1.0), updates)


def disk_s(folder: Path, num_parameters: int, updates: int) -> float:
    """Seconds in which the disk reads and writes all moments once, a thread each, in pieces as large as pages."""
    num_bytes = MOMENT_BYTES * num_parameters
    piece = num_bytes // SHARE // 4 // 8192 * 8192
    file = PageFile(folder, DISK_SLOTS * num_bytes)
    memories = [memoryview(mmap.mmap(-1, piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) for _ in range(2)]

    def go(move: Callable[[int, memoryview], None], memory: memoryview, first: int) -> None:
        for start in range(0, num_bytes - piece + 1, piece):
            move(first + start, memory)

    with ThreadPoolExecutor(2) as pool:

        def both() -> None:
            writing = pool.submit(go, file.write, memories[0], 0)
            go(file.read, memories[1], num_bytes // 8192 * 8192)
            writing.result()

        go(file.write, memories[0], num_bytes // 8192 * 8192)
        return seconds_of(both, updates)


SIDES: dict[str, Callable[[Path, int, int], float]] = {
    "memory": lambda folder, count, updates: update_s(folder, count, updates, on_disk=False),
    "disk": lambda folder, count, updates: update_s(folder, count, updates, on_disk=True),
    "plain": disk_s,
}


def measured(side: str, options: argparse.Namespace) -> float:
    """What a process of its own prints."""
    command = [sys.executable, __file__, str(options.folder), "--side", side]
    command += ["--parameters", str(options.parameters), "--updates", str(options.updates)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=int, default=32 * MIB)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--side", choices=SIDES, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(SIDES[options.side](options.folder, options.parameters, options.updates))
        return
    state_bytes = MOMENT_BYTES * options.parameters
    print(f"{machine()}; {state_bytes / MIB:,.0f} MiB of moments, {state_bytes / MIB / SHARE:,.1f} MiB for pages")
    rows = [{side: measured(side, options) for side in SIDES} for _ in range(options.rounds)]
    found = {side: median(row[side] for row in rows) for side in SIDES}
    for side, what in (("memory", "in memory"), ("disk", "on disk"), ("plain", "the disk alone")):
        spread = ", ".join(f"{row[side]:.3f}" for row in rows)
        rate = f"; {state_bytes / MIB / found[side]:,.0f} MiB/s each way" if side != "memory" else ""
        print(f"  {what}: {found[side]:.3f} s an update ({spread}){rate}")
    print(f"  on disk / in memory: {found['disk'] / found['memory']:.1f}")
    print(f"  the disk alone / on disk: {found['plain'] / found['disk']:.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
