"""What less traffic between replicas costs in loss: the same job with plain data parallelism and with each method that
tells less, on real text (Python's own standard library), with the bytes that were handed to the collectives.

Bytes are those of the step records, over all ranks; fully_shard counts none, so for plain data parallelism they are
what it gives to its all-reduce: a gradient of 4 bytes for each parameter and rank.

OMP_NUM_THREADS=1 python benchmarks/train/replicas.py FOLDER [--replicas 2] [--steps 240] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from phalanx.lineage import Lineage
from phalanx.parallel import count_parameters
from phalanx.spec import load_job
from phalanx.trainer.places import job_store

DEADLINE_S = 1800.0
JOB = """
[job]
name = "{name}"
storage = "{folder}/store"
[model.args]
dim = 64
n_layers = 4
n_heads = 4
ffn_dim = 192
vocab_size = 1024
[data]
train = "{folder}/corpus/train"
held_out = "{folder}/corpus/held_out"
[training]
seq_len = 64
steps = {steps}
global_batch_size = 16
mixed_precision_param = "float32"
[optimizer]
lr = 2e-3
[lr_scheduler]
warmup_steps = 20
[parallel]
dp_replicate = {replicas}
dp_shard = 1
zero = 1
local_batch_size = 4
[checkpoint]
interval = {steps}
[validation]
freq = {steps}
windows = 256
[metrics]
folder = "{path}/metrics"
[cluster]
nproc = {replicas}
"""
METHODS = {
    "plain": "",
    "local_10": "[local_updates]\nsteps = 10\n",
    "local_40": "[local_updates]\nsteps = 40\n",
    "average_10": "[local_updates]\nsteps = 10\nouter_lr = 1.0\nouter_momentum = 0.0\n",
    "powersgd_1": '[gradient_compression]\nmethod = "powersgd"\nrank = 1\n',
    "powersgd_4": '[gradient_compression]\nmethod = "powersgd"\nrank = 4\n',
    "powersgd_4_warm": '[gradient_compression]\nmethod = "powersgd"\nrank = 4\nwarmup_steps = 24\n',
    "powersgd_4_all": '[gradient_compression]\nmethod = "powersgd"\nrank = 4\ncompressed = "matrices"\n',
    "powersgd_16_all": '[gradient_compression]\nmethod = "powersgd"\nrank = 16\ncompressed = "matrices"\n',
    "onebit_adam": '[gradient_compression]\nmethod = "onebit_adam"\nwarmup_steps = 60\n',
}


def phalanx(*arguments: str) -> str:
    """Standard output of a command that ends well."""
    command = [sys.executable, "-m", "phalanx.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def prepare(folder: Path) -> None:
    """The corpus, unless it is there."""
    if not (folder / "corpus").exists():
        text = Path(sysconfig.get_paths()["stdlib"], "asyncio")
        options = ("--vocab-size", "1024", "--held-out-fraction", "0.1")
        phalanx("data", "prepare", str(text), "--out", (folder / "corpus").as_uri(), *options)


def measured(folder: Path, name: str, steps: int, replicas: int) -> dict[str, float | str]:
    """One run with a method: losses, and bytes by token."""
    path = folder / f"{name}.toml"
    keys = {"name": name.replace("_", "-"), "folder": folder.as_uri(), "path": folder, "steps": steps}
    path.write_text(JOB.format(replicas=replicas, **keys) + METHODS[name])
    summary = json.loads(phalanx("run", str(path), "--json"))
    job = load_job(path)
    rows = [rows for _, rows in Lineage(job_store(job)).records.live()]
    sent = sum(int(each.replica_bytes.sum()) for each in rows)
    if name == "plain":
        sent = 4 * count_parameters(job) * replicas * steps
    losses = {int(step): float(loss) for each in rows for step, loss in zip(each.step, each.loss, strict=True)}
    last = [losses[step] for step in range(steps - 19, steps + 1)]
    return {
        "method": name,
        "bytes_per_token": sent / summary["tokens"],
        "train_loss": sum(last) / len(last),
        "held_out_loss": summary["eval_loss"],
        "step_s": float(sorted(seconds for each in rows for seconds in each.step_time_s)[steps // 2]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    print("| method | bytes a token | of plain | train loss, last 20 steps | held-out loss | median step |")
    print("|---|---|---|---|---|---|")
    plain = 0.0
    for name in options.only:
        row = measured(folder, name, options.steps, options.replicas)
        plain = plain or float(row["bytes_per_token"])
        share = float(row["bytes_per_token"]) / plain
        numbers = f"{row['bytes_per_token']:,.1f} | {share:.1%} | {row['train_loss']:.4f} | {row['held_out_loss']:.4f}"
        print(f"| {name} | {numbers} | {1000 * float(row['step_s']):.0f} ms |", flush=True)


if __name__ == "__main__":
    main()
