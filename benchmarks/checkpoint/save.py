"""Checkpoints side by side: ours and `torch.distributed.checkpoint` (DCP), one run, interleaved rounds, medians.

Stall is all blocked time of the training thread: the call that saves, and the wait before the optimizer may change the
tensors. `beside` means with `--beside` seconds of matrix products (a forward and backward pass) in between and on until
the checkpoint is there; `at once` is the same with nothing beside. DCP: `async_save` as it comes, and with each of its
stagers that runs here, kept from save to save. Save to commit is from the call to the manifest, with all hashing, in
the thread that commits, against one raw write and fsync of the same bytes in a thread under the same load; restore,
every chunk verified, against `dcp.load`. The slow-down is of those products while an upload goes on. Before each of
these the disk is idle (sync).

OMP_NUM_THREADS=1 python benchmarks/checkpoint/save.py [--gib 0.5 2.2] [--ranks 1 2] [--rounds 3] [--folder DIR]
[--json FILE]: all four in about 8 minutes where the disk takes 1 GB/s. 2.2 GiB need 18 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from phalanx.core.box import HeldTensor, whole
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest, keys
from phalanx.objects import open_store
from phalanx.snapshot import background, commit
from phalanx.snapshot.restore import restore
from phalanx.snapshot.writer import Writer

DIGEST = "sha256:" + "0" * 64
SHAPE = (2048, 2048)
DEADLINE_S = 1800.0
STAGERS = {
    "plain": StagingOptions(False, False, False, False),
    "shared": StagingOptions(False, True, False, False),
    "async": StagingOptions(False, False, True, False),
}  # the others need CUDA
_SLICE_S = 0.02
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of all ranks. beside_s: how long the stand-in for forward and backward takes."""

    gib: float
    world_size: int
    rounds: int
    beside_s: float
    folder: Path


def compute(seconds: float) -> int:
    """Matrix products for about `seconds`; how many."""
    left, count, end = torch.ones(256, 256), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(left, left)
        count += 1
    return count


def timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


class Bench:
    """One rank's tensors, and what is timed of them."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting, self.rank = setting, rank
        count = max(1, int(setting.gib * 2**30) // (4 * SHAPE[0] * SHAPE[1]) // setting.world_size)
        names = [f"model.{rank}.{number}" for number in range(count)]
        self.tensors = {name: torch.randn(SHAPE) for name in names}
        self.num_bytes = sum(each.nbytes for each in self.tensors.values()) * setting.world_size
        self.held = [HeldTensor(name, SHAPE, whole(SHAPE), each) for name, each in self.tensors.items()]
        self.store = open_store(f"file://{setting.folder}/job")
        self.lineage = Lineage(self.store)
        if rank == 0:
            self.lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={})
        dist.barrier()
        self.writer = Writer(self.store, rank, setting.world_size, deadline_s=DEADLINE_S)
        self.writer.prepare(self.held).result(DEADLINE_S)
        self.stagers = {name: DefaultStager(options) for name, options in STAGERS.items()}
        self.rates: dict[str, list[float]] = {}

    def begin(self) -> float:
        """The moment at which all ranks begin, the disk idle."""
        os.sync()
        dist.barrier()
        return time.perf_counter()

    def work(self, seconds: float, done: Callable[[], bool], label: str) -> None:
        """Products for `seconds`; their rate is kept for as long as it is not `done()`."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            was_done, rate = done(), compute(_SLICE_S) / _SLICE_S
            if not was_done:
                self.rates.setdefault(label, []).append(rate)

    def work_until(self, done: Callable[[], bool], label: str) -> None:
        """Products until it is `done()`."""
        while not done():
            self.work(_SLICE_S, done, label)

    def raw_s(self, step: int, beside_s: float) -> float:
        """A raw write of the same bytes, with fsync; products beside it or not."""
        path = self.setting.folder / f"raw-{self.rank}-{step}"

        def act() -> float:
            with path.open("wb") as file:
                for each in self.tensors.values():
                    file.write(each.numpy().data)
                os.fsync(file.fileno())
            return time.perf_counter()

        start = self.begin()
        writing = background.begin(act, "raw-write")
        if beside_s:
            self.work_until(writing.done, "raw")
        seconds = writing.result(DEADLINE_S) - start
        dist.barrier()
        path.unlink()
        return seconds

    def ours(self, step: int, beside_s: float) -> Figures:
        """Stall, save to commit; the rate of products beside the upload."""
        start = self.begin()
        pending = self.writer.begin(1, step, self.held)
        stall_s = time.perf_counter() - start

        def act() -> float:
            pending.wait(DEADLINE_S)
            if self.rank == 0:
                loader = LoaderState(step, step)
                draft = Manifest(1, step, self.setting.world_size, DIGEST, DIGEST, DIGEST, DIGEST, loader, {}, (), ())
                commit(self.lineage, self.store, draft, self.setting.world_size, DEADLINE_S)
            return time.perf_counter()

        committing = background.begin(act, "commit")
        self.work(beside_s, committing.done, "ours")
        stall_s += timed(lambda: pending.wait_captured(DEADLINE_S))
        if beside_s:
            self.work_until(committing.done, "ours")
        commit_s = committing.result(DEADLINE_S) - start
        dist.barrier()
        return {"stall_s": stall_s, "commit_s": commit_s}

    def theirs(self, step: int, beside_s: float, stager: str | None) -> Figures:
        """The same of DCP; stager None: `async_save` as it comes."""
        path = self.setting.folder / f"dcp-{step}"
        chosen: Any = None if stager is None else self.stagers[stager]
        start = self.begin()
        response: Any = async_save(self.tensors, checkpoint_id=path, async_stager=chosen)
        stall_s = time.perf_counter() - start
        upload = getattr(response, "upload_completion", response)
        self.work(beside_s, upload.done, "dcp")
        staged = getattr(response, "staging_completion", None)
        if staged is not None:
            stall_s += timed(staged.result)
        if beside_s:
            self.work_until(upload.done, "dcp")
        upload.result()
        dist.barrier()
        return {"stall_s": stall_s, "commit_s": time.perf_counter() - start}

    def restores(self, ours: int, theirs: int) -> Figures:
        """Both read what they wrote, into other tensors."""
        target = {name: torch.zeros_like(each) for name, each in self.tensors.items()}
        held = [HeldTensor(name, SHAPE, whole(SHAPE), each) for name, each in target.items()]
        manifest = next(m for m in map(self.lineage.manifest, self.lineage.checkpoints()) if m.step == ours)
        self.begin()
        ours_s = timed(lambda: restore(self.store, manifest, held))
        assert all(torch.equal(each, self.tensors[name]) for name, each in target.items())
        for each in target.values():
            each.zero_()
        self.begin()
        theirs_s = timed(lambda: load(target, checkpoint_id=self.setting.folder / f"dcp-{theirs}"))
        return {"restore_s": ours_s, "dcp_load_s": theirs_s}

    def warm(self) -> None:
        """Both sides touch the memory that they keep."""
        self.ours(0, 0.0)
        for step, stager in enumerate(self.stagers):
            self.theirs(step, 0.0, stager)
            self.remove(f"dcp-{step}")
        self.remove_objects(0)

    def remove(self, name: str) -> None:
        """Rank 0 removes a folder that all have done with."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.setting.folder / name)

    def remove_objects(self, step: int) -> None:
        """Frees the disk and the page cache of a save of ours."""
        self.remove(f"job/{keys.objects(CheckpointRef(1, step))}")

    def round(self, number: int) -> Figures:
        """Everything once, each pair in turn first. What was written is removed as soon as it was read."""
        found, step = Figures(), 100 * number
        for key, beside_s in (("at_once_", 0.0), ("beside_", self.setting.beside_s)):
            ours_step = step
            for is_raw in (True, False) if number % 2 else (False, True):
                each = {"raw_s": self.raw_s(step, beside_s)} if is_raw else self.ours(step, beside_s)
                found |= {f"{key}{name}": value for name, value in each.items()}
            for stager in (None, *self.stagers):
                step += 1
                label = f"{key}dcp_{stager or 'default'}_"
                found |= {f"{label}{name}": value for name, value in self.theirs(step, beside_s, stager).items()}
                if stager is None and key == "at_once_":
                    found |= self.restores(ours_step, step)
                self.remove(f"dcp-{step}")
                if stager is None:
                    self.remove_objects(ours_step)
            step += 1
        found |= {f"products_beside_{label}": median(self.rates[label]) for label in ("ours", "raw", "dcp")}
        found["products_alone"] = compute(0.5) / 0.5
        self.rates.clear()
        return found


def one_rank(setting: Setting, rank: int, answers: Any) -> None:
    """All rounds; rank 0 answers with the slowest rank's median of each figure."""
    torch.set_num_threads(1)
    init = f"file://{setting.folder}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=setting.world_size)
    bench = Bench(setting, rank)
    bench.warm()
    rounds = [bench.round(number) for number in range(1, setting.rounds + 1)]
    medians = {name: median(each[name] for each in rounds) for name in rounds[0]}
    gathered: list[Any] = [None] * setting.world_size
    dist.all_gather_object(gathered, medians)
    if rank == 0:
        worst = {name: max(each[name] for each in gathered) for name in medians}
        answers.put({"gib": bench.num_bytes / 2**30, **worst})
    for stager in bench.stagers.values():
        stager.close()
    dist.destroy_process_group()


def measured(setting: Setting) -> Figures:
    """Runs the ranks in processes of their own."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=one_rank, args=(setting, rank, answers)) for rank in range(setting.world_size)]
    for each in ranks:
        each.start()
    found: Figures = answers.get(timeout=DEADLINE_S)
    for each in ranks:
        each.join()
    return found


def ratios(found: Figures) -> Figures:
    """Ours by the peer's, as the targets are stated, and the rates of products while uploads go on."""
    said = {}
    for key, label in (("at_once_", "at once"), ("beside_", "beside")):
        stagers = [found[f"{key}dcp_{name}_stall_s"] for name in STAGERS]
        said[f"stall / dcp default, {label} (<= 0.5)"] = found[f"{key}stall_s"] / found[f"{key}dcp_default_stall_s"]
        said[f"stall / dcp best stager, {label} (<= 1)"] = found[f"{key}stall_s"] / min(stagers)
        said[f"save to commit / raw write, {label} (<= 1.15)"] = found[f"{key}commit_s"] / found[f"{key}raw_s"]
    said["restore / dcp.load (<= 1)"] = found["restore_s"] / found["dcp_load_s"]
    for name in ("ours", "raw", "dcp"):
        said[f"products beside {name} / alone"] = found[f"products_beside_{name}"] / found["products_alone"]
    return said


def table(columns: list[dict[str, Any]], rounds: int) -> str:
    """What was found, a column for each size and number of ranks."""
    heads = [f"{each['gib']:.1f} GiB, {each['ranks']} rank(s)" for each in columns]
    lines = [f"| median of {rounds}, slowest rank | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for part in ("figures", "ratios"):
        rows = {name: " | ".join(f"{each[part][name]:.3f}" for each in columns) for name in columns[0][part]}
        lines += [f"| {name} | {values} |" for name, values in rows.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[0.5, 2.2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=float, default=1.0, help="seconds of products between a save and the update")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    columns: list[dict[str, Any]] = []
    for gib in options.gib:
        for world_size in options.ranks:
            load, began = os.getloadavg()[0], time.perf_counter()
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                found = measured(Setting(gib, world_size, options.rounds, options.beside, Path(name)))
            said = ratios(found)
            columns.append({"gib": found.pop("gib"), "ranks": world_size, "figures": found, "ratios": said})
            print(f"{gib:g} GiB, {world_size} rank(s): {time.perf_counter() - began:.0f} s, load before {load:.1f}")
            print("\n".join(f"  {key:46} {value:8.3f}" for key, value in said.items()), flush=True)
    print(table(columns, options.rounds))
    if options.json:
        options.json.write_text(json.dumps(columns, indent=1))


if __name__ == "__main__":
    main()
