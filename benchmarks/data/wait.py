"""How long a rank waits for data in the demo job: the step records of a short `phalanx run`.

python benchmarks/data/wait.py FOLDER [--set KEY=VALUE ...]     (text below `docs/` is prepared into FOLDER first)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from corpus import machine

from phalanx.lineage import Lineage
from phalanx.lineage.records import StepRows
from phalanx.spec import load_job
from phalanx.trainer.places import job_store

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    folder, options = Path(sys.argv[1]).absolute(), sys.argv[2:]
    phalanx = [sys.executable, "-m", "phalanx.cli"]
    data = f"file://{folder}/corpus"
    command = [*phalanx, "data", "prepare", str(ROOT / "docs"), "--out", data, "--vocab-size", "2048"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    settings = [f"job.storage=file://{folder}/runs", f"data.train={data}/train", f"data.held_out={data}/held_out"]
    settings += [f"metrics.folder={folder}/metrics", "validation.freq=0"]
    settings += [each for each in options if each != "--set"]
    overrides = [part for setting in settings for part in ("--set", setting)]
    job_file = ROOT / "examples" / "demo.toml"
    subprocess.run([*phalanx, "run", str(job_file), *overrides], check=True, stdout=subprocess.DEVNULL)
    lineage = Lineage(job_store(load_job(job_file, settings)))
    steps = StepRows.concatenate([rows for _, rows in lineage.records.live()])
    later = steps.step > 1
    wait_s, step_s = steps.data_wait_s[later], steps.step_time_s[later]
    waited, wait_ms, step_ms = wait_s.sum() / step_s.sum(), np.median(wait_s) * 1e3, np.median(step_s) * 1e3
    print(
        f"{machine()}; steps 2 to {int(steps.step.max())}: a rank waits {waited:.2%} of a step, "
        f"median {wait_ms:.2f} ms of {step_ms:.0f} ms, longest {wait_s.max() * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
