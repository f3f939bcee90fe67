"""What optimizer state on a local disk costs: seconds of an update with the moments in memory, and in pages of a file
in FOLDER with a tenth of that memory; beside them what the disk gives to plain reads and writes of the same sizes.

Beside the seconds: by how much the process has grown since before the optimizer was made, at most (its PSS, sampled).

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
import threading
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


class Growth:
    """Most bytes by which this process grows between enter and exit: its share of all memory (PSS), every 10 ms."""

    def __enter__(self) -> Growth:
        self._before, self.most_bytes = pss_bytes(), 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.most_bytes = max(self.most_bytes, pss_bytes() - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def pss_bytes() -> int:
    """Of this process, now."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) << 10


def update_s(folder: Path, num_parameters: int, updates: int, *, on_disk: bool) -> tuple[float, int]:
    """Seconds of an update of this process, and by how many bytes the optimizer makes it grow."""
    shape = (num_parameters // COLUMNS, COLUMNS)
    held = [HeldTensor("weight", shape, whole(shape), torch.randn(shape))]
    budget_bytes = MOMENT_BYTES * num_parameters // SHARE
    gradient = torch.randn(shape) * 1e-3
    with Growth() as growth:
        optimizer = optimizer_of(job_of(folder, budget_bytes, on_disk=on_disk), held, ReplicaLink(None))
        seconds = seconds_of(lambda: optimizer.update([gradient], 1.0, 1.0), updates)
    return seconds, growth.most_bytes


def disk_s(folder: Path, num_parameters: int, updates: int) -> tuple[float, int]:
    """Seconds (and no bytes) in which the disk reads and writes all moments once, a thread each, page by page."""
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
        return seconds_of(both, updates), 0


SIDES: dict[str, Callable[[Path, int, int], tuple[float, int]]] = {
    "memory": lambda folder, count, updates: update_s(folder, count, updates, on_disk=False),
    "disk": lambda folder, count, updates: update_s(folder, count, updates, on_disk=True),
    "plain": disk_s,
}


def measured(side: str, options: argparse.Namespace) -> tuple[float, int]:
    """What a process of its own prints."""
    command = [sys.executable, __file__, str(options.folder), "--side", side]
    command += ["--parameters", str(options.parameters), "--updates", str(options.updates)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    seconds, grown_bytes = json.loads(done.stdout)
    return seconds, grown_bytes


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
        print(json.dumps(SIDES[options.side](options.folder, options.parameters, options.updates)))
        return
    state_bytes = MOMENT_BYTES * options.parameters
    print(f"{machine()}; {state_bytes / MIB:,.0f} MiB of moments, {state_bytes / MIB / SHARE:,.1f} MiB for pages")
    rows = [{side: measured(side, options) for side in SIDES} for _ in range(options.rounds)]
    found = {side: median(row[side][0] for row in rows) for side in SIDES}
    for side, what in (("memory", "in memory"), ("disk", "on disk"), ("plain", "the disk alone")):
        spread = ", ".join(f"{row[side][0]:.3f}" for row in rows)
        rate = f"; {state_bytes / MIB / found[side]:,.0f} MiB/s each way" if side != "memory" else ""
        print(f"  {what}: {found[side]:.3f} s an update ({spread}){rate}")
    for side in ("memory", "disk"):
        print(f"  {side}: the process grows by {max(row[side][1] for row in rows) / MIB:,.1f} MiB")
    print(f"  on disk / in memory: {found['disk'] / found['memory']:.1f}")
    print(f"  the disk alone / on disk: {found['plain'] / found['disk']:.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
