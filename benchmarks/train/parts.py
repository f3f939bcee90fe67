"""Where the time of a step goes in `phalanx run`: the parts that step records hold, their sum beside the time from line
to line of progress, and the share of `rest`, which is what the loop itself costs. Of the job that `loop.py` measures,
or of a job file as it is, on made-up windows.

OMP_NUM_THREADS=1 python benchmarks/train/parts.py FOLDER [--ranks 1 2] [--steps 30]
OMP_NUM_THREADS=1 python benchmarks/train/parts.py FOLDER --job examples/demo.toml [--set parallel.pp=1 ...]
OMP_NUM_THREADS=1 python benchmarks/train/parts.py FOLDER --records JOB.toml
--job: the file's own steps, checkpoints and evaluations; storage and data are in FOLDER. --records: runs nothing, and
prints the parts of a job that has run.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from loop import JOB, MODEL, SEQ_LEN, VOCAB_SIZE, WINDOWS_A_RANK
from sides import WARM, steps_of

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from corpus import machine, write_split

from phalanx.core.step_parts import Part
from phalanx.lineage import Lineage, StepRows
from phalanx.objects import open_store
from phalanx.spec import Job, load_job
from phalanx.trainer.places import job_store

MOST_REST, MOST_APART = 0.02, 0.02


def write_job(folder: Path, ranks: int, steps: int) -> Path:
    """The job of `loop.py`, under a fresh name, and its windows."""
    _write_windows(folder / "split", VOCAB_SIZE)
    model = "\n".join(f"{key} = {value}" for key, value in MODEL.items())
    sizes = {"ranks": ranks, "batch": WINDOWS_A_RANK * ranks, "windows": WINDOWS_A_RANK, "steps": steps}
    path = folder / "job.toml"
    path.write_text(JOB.format(folder=folder, run="run", model=model, seq_len=SEQ_LEN, **sizes))
    return path


def _write_windows(split: Path, vocab_size: int, *, is_held_out: bool = False) -> None:
    tokens = np.random.default_rng(0).integers(0, vocab_size, 2_000_000, dtype=np.uint16)
    write_split(open_store(f"file://{split}"), tokens, 1_000_000, vocab_size, is_held_out=is_held_out)


def of_file(path: Path, folder: Path, overrides: Sequence[str]) -> list[str]:
    """All overrides of a job file: those given, and that its storage and data are in `folder`, where made-up windows
    are then.
    """
    names = ["train", "held_out"] if load_job(path, overrides).data.held_out else ["train"]
    vocab_size = load_job(path, overrides).model.args.vocab_size
    for name in names:
        _write_windows(folder / name, vocab_size, is_held_out=name == "held_out")
    placed = [f"data.{name}=file://{folder}/{name}" for name in names]
    placed += [f"job.storage=file://{folder}/runs", f"metrics.folder={folder}/metrics"]
    return [*overrides, *placed, "metrics.log_freq=1"]


def run(path: Path, overrides: Sequence[str]) -> list[float]:
    """Runs a job; when the line of each step came, in seconds."""
    told = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "phalanx.cli", "run", str(path), *told]
    mark = "  norm "  # which a line of an evaluation lacks
    return [moment for (moment,) in steps_of(command, {}, mark)]


def show(job: Job, moments: Sequence[float] = ()) -> None:
    """Prints the parts of rank 0's steps behind the first ones, in milliseconds and in parts of the whole, and beside
    their sum the time from the line of the last of the first ones to that of the last.
    """
    rows = StepRows.concatenate([steps for _, steps in Lineage(job_store(job)).records.live()])
    kept = np.argsort(rows.step)[WARM:]
    seconds = {part: getattr(rows, part)[kept] for part in Part}
    whole = np.sum(list(seconds.values()), axis=0)
    print(f"  {len(kept)} steps, median {1e3 * np.median(whole):.1f} ms")
    for part, found in seconds.items():
        print(f"  {part.removesuffix('_s'):14} {1e3 * np.median(found):8.2f} ms {found.sum() / whole.sum():7.2%}")
    share = seconds[Part.REST].sum() / whole.sum()
    print(f"  rest {share:.2%}, target below {MOST_REST:.0%}", flush=True)
    if len(moments) == len(rows.step):
        wall_s = moments[-1] - moments[WARM - 1]
        apart = whole.sum() / wall_s - 1
        told = f"{apart:+.2%}, target within {MOST_APART:.0%}"
        print(f"  sum {whole.sum():.3f} s, wall {wall_s:.3f} s: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--job", type=Path, default=None)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--records", type=Path, default=None)
    options = parser.parse_args()
    if options.records is not None:
        show(load_job(options.records, options.overrides))
        return
    for ranks in options.ranks if options.job is None else [None]:
        folder = options.folder.absolute() / uuid.uuid4().hex[:8]
        path, overrides = options.job, options.overrides
        if ranks is None:
            overrides = of_file(path, folder, overrides)
        else:
            path = write_job(folder, ranks, options.steps)
        job = load_job(path, overrides)
        load = os.getloadavg()[0]
        moments = run(path, overrides)
        print(f"{machine()}; {job.cluster.world_size} rank(s); load {load:.1f} before, {os.getloadavg()[0]:.1f} behind")
        show(job, moments)


if __name__ == "__main__":
    main()
