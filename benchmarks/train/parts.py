"""Where the time of a step goes in `phalanx run`: the parts that step records hold, of the job that `loop.py` measures
or of another one, and the share of `rest`, which is what the loop itself costs.

OMP_NUM_THREADS=1 python benchmarks/train/parts.py FOLDER [--ranks 1 2] [--steps 30] [--records JOB.TOML]
--records: runs nothing, and prints the parts of a job that has run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
from loop import JOB, MODEL, SEQ_LEN, VOCAB_SIZE, WARM, WINDOWS_A_RANK

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from corpus import machine, write_split

from phalanx.core.step_parts import Part
from phalanx.lineage import Lineage, StepRows
from phalanx.objects import open_store
from phalanx.spec import load_job
from phalanx.trainer.places import job_store

MOST_REST = 0.02


def write_job(folder: Path, ranks: int, steps: int) -> Path:
    """The job of `loop.py`, under a fresh name, and its windows."""
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 2_000_000, dtype=np.uint16)
    run = uuid.uuid4().hex[:8]
    write_split(open_store(f"file://{folder}/{run}/split"), tokens, 1_000_000, VOCAB_SIZE)
    model = "\n".join(f"{key} = {value}" for key, value in MODEL.items())
    sizes = {"ranks": ranks, "batch": WINDOWS_A_RANK * ranks, "windows": WINDOWS_A_RANK, "steps": steps}
    path = folder / run / "job.toml"
    path.write_text(JOB.format(folder=folder / run, run="run", model=model, seq_len=SEQ_LEN, **sizes))
    return path


def show(path: Path) -> None:
    """Prints the parts of rank 0's steps behind the first ones, in milliseconds and in parts of the whole."""
    rows = StepRows.concatenate([steps for _, steps in Lineage(job_store(load_job(path))).records.live()])
    kept = np.argsort(rows.step)[WARM:]
    seconds = {part: getattr(rows, part)[kept] for part in Part}
    whole = np.sum(list(seconds.values()), axis=0)
    print(f"  {len(kept)} steps, median {1e3 * np.median(whole):.1f} ms")
    for part, found in seconds.items():
        print(f"  {part.removesuffix('_s'):14} {1e3 * np.median(found):8.2f} ms {found.sum() / whole.sum():7.2%}")
    share = seconds[Part.REST].sum() / whole.sum()
    print(f"  rest {share:.2%}, target below {MOST_REST:.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--records", type=Path, default=None)
    options = parser.parse_args()
    if options.records is not None:
        show(options.records)
        return
    folder = options.folder.absolute()
    for ranks in options.ranks:
        path = write_job(folder, ranks, options.steps)
        load = os.getloadavg()[0]
        subprocess.run(
            [sys.executable, "-m", "phalanx.cli", "run", str(path)], check=True, stdout=subprocess.DEVNULL, timeout=900
        )
        print(f"{machine()}; {ranks} rank(s); load {load:.1f} before, {os.getloadavg()[0]:.1f} behind")
        show(path)


if __name__ == "__main__":
    main()
