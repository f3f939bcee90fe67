"""Steps of `phalanx run` beside other loops with the same model, batch and number of ranks: a hand-written PyTorch loop
(bare.py), and the trainers of Hugging Face, Lightning and torchtitan (transformers_peer.py, lightning_peer.py,
torchtitan_peer.py).

All print a line a step, and the time from line to line counts: everything a run does between two steps is in it (for
Phalanx the wait for data, the agreement of all ranks, step records with a digest of every window, metrics). Runs are
interleaved; of each the median step behind the first `WARM` counts, in seconds that went by and in seconds that all its
ranks together computed: the second says more on a machine with other work. Ranks replicate the weights on all sides
(`dp_replicate`, DistributedDataParallel). The other projects' trainers run in .venv-peers (`make setup-test`).

OMP_NUM_THREADS=1 python benchmarks/train/loop.py FOLDER [--against bare transformers lightning torchtitan]
    [--ranks 1 2] [--steps 30] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from sides import DEADLINE_S, PEERS_PYTHON, WARM, median_step, meeting, steps_of

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from corpus import machine, write_split

from phalanx.objects import open_store

VOCAB_SIZE, SEQ_LEN, WINDOWS_A_RANK = 2048, 256, 8
MODEL = {
    "dim": 256,
    "n_layers": 4,
    "n_heads": 8,
    "n_kv_heads": 4,
    "ffn_dim": 688,
    "vocab_size": VOCAB_SIZE,
}
PEERS = {
    "bare": (sys.executable, "bare.py"),
    "transformers": (PEERS_PYTHON, "transformers_peer.py"),
    "lightning": (PEERS_PYTHON, "lightning_peer.py"),
    "torchtitan": (PEERS_PYTHON, "torchtitan_peer.py"),
}
TARGETS = {"bare": 0.98, "transformers": 1.0, "lightning": 1.0, "torchtitan": 1.0}

JOB = """
[job]
name = "loop"
storage = "file://{folder}/{run}"
[model.args]
{model}
[data]
train = "file://{folder}/split"
document_mask = false
[training]
seq_len = {seq_len}
steps = {steps}
global_batch_size = {batch}
mixed_precision_param = "float32"
[optimizer]
lr = 1e-3
[parallel]
dp_replicate = {ranks}
dp_shard = 1
zero = 1
local_batch_size = {windows}
[checkpoint]
interval = 1_000_000
[metrics]
log_freq = 1
folder = "{folder}/{run}-metrics"
[cluster]
nproc = {ranks}
"""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step that went by, and that all ranks together computed."""

    wall_s: float
    processor_s: float


def _processor_s() -> float:
    """Seconds that all processes which this one started, and which still run, have computed."""
    ran = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            ran += times.user + times.system
    return ran


CLOCKS = (time.perf_counter, _processor_s)


def _step_time(shown: Iterator[tuple[float, ...]]) -> StepTime:
    return StepTime(*median_step(shown))


def prepare(folder: Path) -> None:
    """Tokens for all sides, as a split of ours and as plain numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 2_000_000, dtype=np.uint16)
    tokens.tofile(folder / "tokens.bin")
    write_split(open_store(f"file://{folder}/split"), tokens, 1_000_000, VOCAB_SIZE)


def ours(folder: Path, ranks: int, steps: int, *settings: str) -> StepTime:
    """settings: keys of the job file and their values (`KEY=VALUE`) over what `JOB` has."""
    run = uuid.uuid4().hex[:8]
    path = folder / f"{run}.toml"
    path.write_text(
        JOB.format(
            folder=folder,
            run=run,
            model="\n".join(f"{key} = {value}" for key, value in MODEL.items()),
            seq_len=SEQ_LEN,
            steps=steps,
            batch=WINDOWS_A_RANK * ranks,
            ranks=ranks,
            windows=WINDOWS_A_RANK,
        )
    )
    command = [sys.executable, "-m", "phalanx.cli", "run", str(path)]
    for setting in settings:
        command += ["--set", setting]
    return _step_time(steps_of(command, {}, "loop: step ", CLOCKS))


def theirs(peer: str, folder: Path, ranks: int, steps: int) -> StepTime:
    run = uuid.uuid4().hex[:8]
    settings = folder / f"{run}.json"
    settings.write_text(
        json.dumps({"model": MODEL, "seq_len": SEQ_LEN, "batch": WINDOWS_A_RANK * ranks, "steps": steps})
    )
    python, script = PEERS[peer]
    command = [python, str(Path(__file__).with_name(script)), str(settings), str(folder / "tokens.bin")]
    command.append(str(folder / f"{run}-rendezvous"))
    environs = meeting(ranks)
    others = [
        subprocess.Popen(command, env=os.environ | environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for environ in environs[1:]
    ]
    try:
        found = _step_time(steps_of(command, environs[0], "step ", CLOCKS))
        for other in others:
            if other.wait(DEADLINE_S):
                raise SystemExit(f"a rank of {script} ended with {other.returncode}")
    finally:
        for other in others:
            other.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.steps < WARM + 3:
        parser.error(f"--steps is {options.steps}: expected {WARM + 3} or more, as the first {WARM} don't count")
    for peer in options.against:
        if not Path(PEERS[peer][0]).exists():
            parser.error(f"--against {peer}: its Python {PEERS[peer][0]} is not there: run make setup-test first")
    folder = options.folder.absolute()
    prepare(folder)
    rows = [row for ranks in options.ranks for row in _compare(folder, ranks, options)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def _compare(folder: Path, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All sides in turns with this many ranks, and what each came to beside Phalanx."""
    print(f"{machine()}; {ranks} rank(s), {options.steps} steps, {options.rounds} rounds", flush=True)
    found: dict[str, list[StepTime]] = {side: [] for side in ("phalanx", *options.against)}
    for number in range(options.rounds):
        for side in list(found)[:: -1 if number % 2 else 1]:
            is_ours = side == "phalanx"
            took = ours(folder, ranks, options.steps) if is_ours else theirs(side, folder, ranks, options.steps)
            found[side].append(took)
            told = f"{took.wall_s:.4f} s a step, {took.processor_s:.4f} s of all ranks' processors"
            print(f"  round {number + 1}: {side} {told}; load {os.getloadavg()[0]:.1f}", flush=True)
    rows: list[dict[str, Any]] = []
    for peer in options.against:
        pairs = list(zip(found["phalanx"], found[peer], strict=True))
        walls = [theirs.wall_s / ours.wall_s for ours, theirs in pairs]
        computed = [theirs.processor_s / ours.processor_s for ours, theirs in pairs]
        told = f"{_spread(walls)}, by processor time {_spread(computed)}"
        print(f"  speed / {peer}: {told}; target {TARGETS[peer]}", flush=True)
        rows.append({"ranks": ranks, "peer": peer, "ratios": walls, "processor_ratios": computed})
    steps = {side: [asdict(took) for took in times] for side, times in found.items()}
    return [*rows, {"ranks": ranks, "step": steps}]


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()
