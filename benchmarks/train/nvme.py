"""What optimizer state on a local disk costs: seconds of an update with the moments in memory, and in pages of a file
in FOLDER with a tenth of that memory; beside them what the disk gives to plain reads and writes of the same pages, as
many of them at once. And, with --steps, seconds of a whole step of `phalanx run` both ways (the job of `loop.py`).

Of an update on disk is told for how long its caller computed; the rest of it, it waited for a page. Of the process, by
how much it has grown since before the optimizer was made, at most (its PSS, sampled).

A process each, in turns, of which the median counts. Parameters and gradients lie in memory on both sides; the update
is the trainer's own (fused AdamW). The first update of a file is told apart: it reads blocks that were never written,
which takes no disk, and the file system notes of each block that it is written now.

OMP_NUM_THREADS=2 python benchmarks/train/nvme.py FOLDER [--parameters 33554432] [--updates 5] [--rounds 3] [--steps 0]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from corpus import machine
from loop import MODEL, ours, prepare

from phalanx.core.box import HeldTensor, whole
from phalanx.paging.file import PageFile
from phalanx.paging.layout import Chunk
from phalanx.paging.state import PagedState, Update
from phalanx.parallel.replicas import ReplicaLink
from phalanx.planner.job_search import model_shape
from phalanx.planner.memory import DISK_SLOTS, MOMENT_BYTES, PAGE_BUFFERS, page_bytes
from phalanx.planner.parameters import count_parameters
from phalanx.spec import Job, parse_job
from phalanx.trainer.optimizer import optimizer_of
from phalanx.trainer.paged_optimizer import PagedOptimizer

MIB = 1 << 20
COLUMNS, SHARE = 4096, 10
DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True)
class Measured:
    """seconds: of the median update behind the first. computed_s: of it, those in which the caller computed."""

    seconds: float
    first_s: float
    computed_s: float = 0.0
    grown_bytes: int = 0


def job_of(folder: Path, budget_bytes: int, *, on_disk: bool) -> Job:
    """Only its optimizer and its model count."""
    paged = {"offload": "nvme", "offload_folder": str(folder), "offload_gib": budget_bytes / (MIB << 10)}
    return parse_job(
        {
            "job": {"name": "nvme", "storage": "memory://nvme"},
            "model": {"args": MODEL},
            "data": {"train": "memory://nvme/train"},
            "training": {"seq_len": 8, "steps": 1, "global_batch_size": 1},
            "optimizer": {"lr": 1e-4, **(paged if on_disk else {})},
        }
    )


def seconds_of(act: Callable[[], object], count: int) -> list[float]:
    """Of a first call and of `count` more."""
    found = []
    for _ in range(count + 1):
        started = time.perf_counter()
        act()
        found.append(time.perf_counter() - started)
    return found


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


def watch(pages: PagedState) -> list[float]:
    """To which each update adds the seconds in which its caller computed."""
    computed: list[float] = []
    update = pages.update

    def watched(act: Update) -> None:
        computed.append(0.0)

        def timed(chunks: Sequence[Chunk], planes: Sequence[torch.Tensor]) -> None:
            started = time.perf_counter()
            act(chunks, planes)
            computed[-1] += time.perf_counter() - started

        update(timed)

    pages.update = watched  # type: ignore[method-assign]
    return computed


def update_s(folder: Path, num_parameters: int, updates: int, *, on_disk: bool) -> Measured:
    """Updates of this process; nothing else is told while its memory is."""
    shape = (num_parameters // COLUMNS, COLUMNS)
    held = [HeldTensor("weight", shape, whole(shape), torch.randn(shape))]
    budget_bytes = MOMENT_BYTES * num_parameters // SHARE
    gradient = torch.randn(shape) * 1e-3

    def update() -> None:
        optimizer.update([gradient], 1.0, 1.0)

    with Growth() as growth:
        optimizer = optimizer_of(job_of(folder, budget_bytes, on_disk=on_disk), held, ReplicaLink(None))
        first = seconds_of(update, 0)[0]
    computed = watch(optimizer.pages) if isinstance(optimizer, PagedOptimizer) else []
    found = seconds_of(update, updates)[1:]
    return Measured(median(found), first, median(computed[1:]) if computed else median(found), growth.most_bytes)


def disk_s(folder: Path, num_parameters: int, updates: int) -> Measured:
    """In which the disk reads and writes all moments once, page by page, as many requests at once as an update has."""
    num_bytes = MOMENT_BYTES * num_parameters
    piece = page_bytes(num_bytes // SHARE) // (2 * mmap.PAGESIZE) * (2 * mmap.PAGESIZE)
    count = num_bytes // piece
    file = PageFile(folder, DISK_SLOTS * count * piece)
    each = PAGE_BUFFERS // 2
    memory = filled(2 * each * piece)
    memories = [memory[number * piece : (number + 1) * piece] for number in range(2 * each)]

    def go(move: Callable[[int, memoryview], None], number: int, first: int) -> None:
        for page in range(number % each, count, each):
            move(first + page * piece, memories[number])

    with ThreadPoolExecutor(2 * each) as pool:

        def both() -> None:
            reads = [pool.submit(go, file.read, number, count * piece) for number in range(each)]
            writes = [pool.submit(go, file.write, each + number, 0) for number in range(each)]
            for future in (*reads, *writes):
                future.result()

        for number in range(each):
            go(file.write, number, count * piece)
        first, *found = seconds_of(both, updates)
        return Measured(median(found), first)


def filled(num_bytes: int) -> memoryview:
    """Memory as the buffers of an update have it, with bytes that no disk can make smaller."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = os.urandom(num_bytes)
    return memoryview(memory)


SIDES: dict[str, Callable[[Path, int, int], Measured]] = {
    "memory": lambda folder, count, updates: update_s(folder, count, updates, on_disk=False),
    "disk": lambda folder, count, updates: update_s(folder, count, updates, on_disk=True),
    "plain": disk_s,
}


def measured(side: str, options: argparse.Namespace) -> Measured:
    """What a process of its own prints."""
    command = [sys.executable, __file__, str(options.folder), "--side", side]
    command += ["--parameters", str(options.parameters), "--updates", str(options.updates)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    return Measured(**json.loads(done.stdout))


def tell_updates(rows: Sequence[dict[str, Measured]], state_bytes: int) -> None:
    """Medians and all of the rounds."""
    found = {side: median(row[side].seconds for row in rows) for side in SIDES}
    for side, what in (("memory", "in memory"), ("disk", "on disk"), ("plain", "the disk alone")):
        spread = ", ".join(f"{row[side].seconds:.3f}" for row in rows)
        rate = f"; {state_bytes / MIB / found[side]:,.0f} MiB/s each way" if side != "memory" else ""
        print(f"  {what}: {found[side]:.3f} s an update ({spread}){rate}; the first {rows[0][side].first_s:.3f} s")
    print(f"  of one on disk the caller computes {median(row['disk'].computed_s for row in rows):.3f} s")
    for side in ("memory", "disk"):
        print(f"  {side}: the process grows by {max(row[side].grown_bytes for row in rows) / MIB:,.1f} MiB")
    shares = [max(row["plain"].seconds, row["memory"].seconds) / row["disk"].seconds for row in rows]
    print(f"  on disk / in memory: {found['disk'] / found['memory']:.2f}")
    spread = f"{min(shares):.2f} to {max(shares):.2f}"
    print(f"  the slower of the disk alone and memory / on disk: {median(shares):.2f} ({spread})")


def tell_steps(folder: Path, steps: int, rounds: int) -> list[dict[str, float]]:
    """Whole steps of `phalanx run`, in turns."""
    prepare(folder)
    num_parameters = count_parameters(model_shape(job_of(folder, MIB, on_disk=False))).total
    budget_bytes = MOMENT_BYTES * num_parameters // SHARE
    gib = budget_bytes / (MIB << 10)
    paged = ("optimizer.offload=nvme", f"optimizer.offload_folder={folder}", f"optimizer.offload_gib={gib:.6f}")
    sides = {"memory": (), "disk": paged}
    rows = [{side: ours(folder, 1, steps, *settings).wall_s for side, settings in sides.items()} for _ in range(rounds)]
    ratios = [row["disk"] / row["memory"] for row in rows]
    print(f"  steps: {SHARE * budget_bytes / MIB:,.1f} MiB of moments, {budget_bytes / MIB:,.1f} MiB for pages")
    for side in sides:
        spread = ", ".join(f"{row[side]:.3f}" for row in rows)
        print(f"  {side}: {median(row[side] for row in rows):.3f} s a step ({spread})")
    print(f"  a step on disk / in memory: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=int, default=32 * MIB)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--side", choices=SIDES, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(asdict(SIDES[options.side](options.folder, options.parameters, options.updates))))
        return
    state_bytes = MOMENT_BYTES * options.parameters
    print(f"{machine()}; {state_bytes / MIB:,.0f} MiB of moments, {state_bytes / MIB / SHARE:,.1f} MiB for pages")
    rows = [{side: measured(side, options) for side in SIDES} for _ in range(options.rounds)]
    tell_updates(rows, state_bytes)
    steps = tell_steps(options.folder.absolute(), options.steps, options.rounds) if options.steps else []
    print(f"  load at the end: {os.getloadavg()[0]:.1f}")
    if options.json:
        told = [{side: asdict(each) for side, each in row.items()} for row in rows]
        options.json.write_text(json.dumps({"updates": told, "steps": steps}, indent=1))


if __name__ == "__main__":
    main()
