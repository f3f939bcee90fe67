"""Checkpoints side by side: ours and `torch.distributed.checkpoint` (DCP), one run, interleaved rounds, medians.

Stall is all blocked time of the training thread: the call that saves, and the wait before the optimizer may change the
tensors, with `--beside` seconds of matrix products (a forward and backward pass) in between; `at once` is the same with
nothing in between. DCP: `async_save` as it comes, and with its stagers kept from save to save.
Save to commit is from the call to the manifest, with all hashing, against one raw write and fsync of the same bytes;
restore, every chunk verified, against `dcp.load`. The slow-down is of those products while an upload goes on.

python benchmarks/checkpoint/save.py [--mb 500 2200] [--ranks 1 2] [--rounds 3] [--folder DIR] [--json FILE]
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
from phalanx.lineage import Lineage, LoaderState, Manifest
from phalanx.objects import open_store
from phalanx.snapshot import commit
from phalanx.snapshot.restore import restore
from phalanx.snapshot.writer import Writer

DIGEST = "sha256:" + "0" * 64
SHAPE = (2048, 2048)
DEADLINE_S = 1800.0
STAGERS = {
    "plain": StagingOptions(False, False, False, False),
    "shared": StagingOptions(False, True, False, False),
}  # kept from save to save; pinned and asynchronous staging need CUDA
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of all ranks. beside_s: how long the stand-in for forward and backward takes."""

    mb: int
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
        count = max(1, setting.mb * 1_000_000 // (4 * SHAPE[0] * SHAPE[1]) // setting.world_size)
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
        self.rates: list[tuple[float, float]] = []

    def raw_s(self, step: int) -> float:
        """A raw write of the same bytes, with fsync."""
        path = self.setting.folder / f"raw-{self.rank}-{step}"

        def act() -> None:
            with path.open("wb") as file:
                for each in self.tensors.values():
                    file.write(each.numpy().data)
                os.fsync(file.fileno())

        dist.barrier()
        seconds = timed(act)
        path.unlink()
        return seconds

    def ours(self, step: int, beside_s: float) -> Figures:
        """Stall, save to commit; the rate of products beside capture and upload."""
        dist.barrier()
        start = time.perf_counter()
        pending = self.writer.begin(1, step, self.held)
        stall_s = time.perf_counter() - start
        compute(beside_s)
        stall_s += timed(lambda: pending.wait_captured(DEADLINE_S))
        while beside_s and not pending.done():
            self.rates.append((time.perf_counter(), compute(0.05) / 0.05))
        pending.wait(DEADLINE_S)
        if self.rank == 0:
            loader = LoaderState(step, step)
            draft = Manifest(1, step, self.setting.world_size, DIGEST, DIGEST, DIGEST, DIGEST, loader, {}, (), ())
            commit(self.lineage, self.store, draft, self.setting.world_size, DEADLINE_S)
        dist.barrier()
        return {"stall_s": stall_s, "commit_s": time.perf_counter() - start}

    def theirs(self, step: int, beside_s: float, stager: str | None) -> Figures:
        """The same of DCP; stager None: `async_save` as it comes."""
        path = self.setting.folder / f"dcp-{step}"
        dist.barrier()
        start = time.perf_counter()
        chosen: Any = None if stager is None else self.stagers[stager]
        response: Any = async_save(self.tensors, checkpoint_id=path, async_stager=chosen)
        stall_s = time.perf_counter() - start
        compute(beside_s)
        staged = getattr(response, "staging_completion", None)
        if staged is not None:
            stall_s += timed(staged.result)
        getattr(response, "upload_completion", response).result()
        dist.barrier()
        return {"stall_s": stall_s, "commit_s": time.perf_counter() - start}

    def restores(self, ours: int, theirs: int) -> Figures:
        """Both read what they wrote, into other tensors."""
        target = {name: torch.zeros_like(each) for name, each in self.tensors.items()}
        held = [HeldTensor(name, SHAPE, whole(SHAPE), each) for name, each in target.items()]
        manifest = next(m for m in map(self.lineage.manifest, self.lineage.checkpoints()) if m.step == ours)
        dist.barrier()
        ours_s = timed(lambda: restore(self.store, manifest, held))
        assert all(torch.equal(each, self.tensors[name]) for name, each in target.items())
        for each in target.values():
            each.zero_()
        dist.barrier()
        theirs_s = timed(lambda: load(target, checkpoint_id=self.setting.folder / f"dcp-{theirs}"))
        return {"restore_s": ours_s, "dcp_load_s": theirs_s}

    def round(self, number: int) -> Figures:
        """Everything once. Folders of DCP are removed as soon as they were read."""
        beside_s, step, found = self.setting.beside_s, 100 * number, Figures()
        found["raw_write_s"] = self.raw_s(step)
        for key, seconds in (("", beside_s), ("at_once_", 0.0)):
            step += 1
            found |= {f"{key}{name}": value for name, value in self.ours(step, seconds).items()}
            if key == "":
                ours_step = step
            for stager in (None, *self.stagers):
                step += 1
                label = f"{key}dcp_{(stager or 'default').replace(' ', '_')}_"
                found |= {f"{label}{name}": value for name, value in self.theirs(step, seconds, stager).items()}
                if stager is None and key == "":
                    found |= self.restores(ours_step, step)
                dist.barrier()
                if self.rank == 0:
                    shutil.rmtree(self.setting.folder / f"dcp-{step}")
        found["products_beside_upload"] = median(rate for _, rate in self.rates) if self.rates else 0.0
        found["products_alone"] = compute(0.5) / 0.5
        self.rates.clear()
        return found


def one_rank(setting: Setting, rank: int, answers: Any) -> None:
    """All rounds; rank 0 answers with the slowest rank's median of each figure (stalls and times)."""
    init = f"file://{setting.folder}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=setting.world_size)
    bench = Bench(setting, rank)
    rounds = [bench.round(number) for number in range(1, setting.rounds + 1)]
    medians = {name: median(each[name] for each in rounds) for name in rounds[0]}
    gathered: list[Any] = [None] * setting.world_size
    dist.all_gather_object(gathered, medians)
    if rank == 0:
        worst = {name: max(each[name] for each in gathered) for name in medians}
        answers.put({"mb": bench.num_bytes // 1_000_000, **worst})
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
    """Ours by the peer's, as the targets are stated."""
    stagers = [found[f"dcp_{name.replace(' ', '_')}_stall_s"] for name in STAGERS]
    return {
        "stall / dcp default (<= 0.5)": found["stall_s"] / found["dcp_default_stall_s"],
        "stall / dcp best stager (<= 1)": found["stall_s"] / min(stagers),
        "save to commit / raw write (<= 1.15)": found["commit_s"] / found["raw_write_s"],
        "restore / dcp.load (<= 1)": found["restore_s"] / found["dcp_load_s"],
        "products beside upload / alone": found["products_beside_upload"] / found["products_alone"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, nargs="+", default=[500, 2200])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    results = []
    for mb in options.mb:
        for world_size in options.ranks:
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                found = measured(Setting(mb, world_size, options.rounds, options.beside, Path(name)))
            results.append({"ranks": world_size, **found, "ratios": ratios(found)})
            print(f"{found['mb']} MB, {world_size} rank(s), median of {options.rounds}, slowest rank")
            for key, value in {**found, **ratios(found)}.items():
                print(f"  {key:42} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
