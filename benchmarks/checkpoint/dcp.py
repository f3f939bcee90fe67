"""Times the door for torch.distributed.checkpoint against torch's own file system: save, async save, load.

Run: OMP_NUM_THREADS=1 python benchmarks/checkpoint/dcp.py [--gib 0.5 2.2] [--ranks 1 2] [--rounds 3] [--folder DIR]
[--json FILE]: all four in about 5 minutes where the disk takes 1 GB/s. One round more goes before those that count.
Prints a line a round, then a table of medians. The state is --gib of fp32 DTensors of 16 MiB, of which each rank holds
its rows. Each pair is timed in turn first, the disk idle before (sync). Stall: from the call of async_save to its
return, and the wait that the next optimizer step needs (`staging_completion`). `raw` writes the same bytes and fsyncs
them. Of the ranks the slowest counts. Loads read what the page cache holds; the door verifies every chunk, torch
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from phalanx.snapshot.dcp import async_save, load, save

SIDE, TENSOR_BYTES = 2048, 4 * 2048 * 2048
GROUP_S = 900
Timer = Callable[[], float]


def main() -> None:
    """All sizes and rank counts, one after the other, in fresh processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[0.5, 2.2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = []
    for gib in options.gib:
        for world_size in options.ranks:
            rounds = _measured(gib, world_size, options.rounds, options.folder)
            rows.append({key: statistics.median(figures[key] for figures in rounds[1:]) for key in rounds[0]})
    _print_table(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def _measured(gib: float, world_size: int, rounds: int, parent: Path | None) -> list[dict[str, float]]:
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        port = _free_port()
        mp.start_processes(rank_main, (world_size, port, folder, gib, rounds + 1), world_size, start_method="spawn")
        lines = (folder / "figures.jsonl").read_text().splitlines()
    finally:
        shutil.rmtree(folder)
    print("\n".join(lines), flush=True)
    return [json.loads(line) for line in lines]


def rank_main(rank: int, world_size: int, port: int, folder: Path, gib: float, rounds: int) -> None:
    """One rank: every round all measurements in turn."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_S),
    )
    state = make_state(world_size, gib)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    best = DefaultStager(StagingOptions(False, False, True, False))
    for number in range(1, rounds + 1):
        figures = measure(state, target, folder, number, best)
        if rank == 0:
            with (folder / "figures.jsonl").open("a") as file:
                file.write(json.dumps(figures) + "\n")
    best.close()
    dist.destroy_process_group()


def make_state(world_size: int, gib: float) -> dict[str, DTensor]:
    """fp32 DTensors of 16 MiB, `gib` GiB in all, each rank's rows its own."""
    mesh = init_device_mesh("cpu", (world_size,))
    count = max(1, int(gib * 2**30) // TENSOR_BYTES)
    rows = SIDE // world_size
    return {f"t{n}": DTensor.from_local(torch.randn(rows, SIDE), mesh, [Shard(0)]) for n in range(count)}


def measure(
    state: dict[str, Any], target: dict[str, Any], folder: Path, number: int, best: DefaultStager
) -> dict[str, float]:
    """One round. All figures are seconds, the slowest rank's."""
    url, theirs = f"file://{folder}/job", str(folder / f"dcp{number}")
    figures = {"ranks": float(dist.get_world_size()), "gib": sum(value.nbytes for value in state.values()) / 2**30}
    figures["raw_write_s"] = _timed(lambda: _raw_write(state, folder / f"raw{number}-{dist.get_rank()}"))
    saves: dict[str, Callable[[], Any]] = {
        "dcp_save_s": lambda: dcp.save(state, checkpoint_id=theirs),
        "phalanx_save_s": lambda: save(state, url, step=2 * number),
    }
    begun: dict[str, Callable[[], Any]] = {
        "dcp_async": lambda: dcp.async_save(state, checkpoint_id=f"{theirs}-default"),
        "dcp_async_best": lambda: dcp.async_save(state, checkpoint_id=f"{theirs}-staged", async_stager=best),
        "phalanx_async": lambda: async_save(state, url, step=2 * number + 1),
    }
    loads: dict[str, Callable[[], Any]] = {
        "dcp_load_s": lambda: dcp.load(target, checkpoint_id=theirs),
        "phalanx_load_s": lambda: load(target, url),
    }
    for name in _in_turn(saves, number):
        figures[name] = _timed(saves[name])
    for name in _in_turn(begun, number):
        figures[f"{name}_stall_s"], figures[f"{name}_s"] = _async(begun[name])
    for name in _in_turn(loads, number):
        for value in target.values():
            value.to_local().zero_()
        figures[name] = _timed(loads[name])
    assert all(torch.equal(target[name].to_local(), value.to_local()) for name, value in state.items())
    for left in folder.glob("*"):
        if dist.get_rank() == 0 and left.name != "figures.jsonl" and left.name != "job":
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    dist.barrier()
    return {key: round(value, 3) for key, value in figures.items()}


def _in_turn(acts: Mapping[str, Any], number: int) -> list[str]:
    return list(acts) if number % 2 else list(reversed(acts))


def _raw_write(state: Mapping[str, DTensor], path: Path) -> None:
    with path.open("wb") as file:
        for value in state.values():
            file.write(value.to_local().numpy().data)
        os.fsync(file.fileno())


def _async(begin: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that the caller is blocked, and seconds until the checkpoint is there."""
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    pending = begin()
    staging = getattr(pending, "staging_completion", None)
    if staging is not None:
        staging.result()
    stall_s = time.perf_counter() - start
    getattr(pending, "upload_completion", pending).result()
    return _slowest(stall_s), _slowest(time.perf_counter() - start)


def _timed(work: Callable[[], Any]) -> float:
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    work()
    return _slowest(time.perf_counter() - start)


def _slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _print_table(rows: list[dict[str, float]]) -> None:
    """Medians of the rounds behind the first, which touches fresh memory."""
    print("| GiB | ranks | raw write + fsync | save: dcp / phalanx | async stall: dcp / best / phalanx |", end=" ")
    print("async to commit: dcp / phalanx | load: dcp / phalanx, verified |\n|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [
            f"{row['gib']:.1f}",
            f"{row['ranks']:g}",
            f"{row['raw_write_s']:.2f} s",
            f"{row['dcp_save_s']:.2f} / {row['phalanx_save_s']:.2f} s",
            f"{row['dcp_async_stall_s']:.2f} / {row['dcp_async_best_stall_s']:.2f} / "
            f"{row['phalanx_async_stall_s']:.2f} s",
            f"{row['dcp_async_s']:.2f} / {row['phalanx_async_s']:.2f} s",
            f"{row['dcp_load_s']:.2f} / {row['phalanx_load_s']:.2f} s",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
