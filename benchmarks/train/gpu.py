"""A 1-billion-class decoder on one GPU: tokens/s, MFU (docs/mfu.md) and memory of `phalanx run` with compiled layers,
and beside it a bare PyTorch loop, both in bf16 and, where torchao is installed, with fp8 products; of torchtitan's
trainer, where that is installed here or in .venv-peers; and of each attention kernel without compilation. Then the
ratios: of Phalanx to the bare loop and to torchtitan, of fp8 to bf16.

Needs torch with CUDA and this repository, nothing else; under 8 minutes: what has not begun by then is left out, and
said so. `--device cpu` runs a tiny model through the same commands, uncompiled, to see that they work; its figures say
nothing.

OMP_NUM_THREADS=8 python benchmarks/train/gpu.py FOLDER [--steps 20] [--windows 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loop import PEERS_PYTHON, meeting, step_s, steps_of

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from corpus import machine, write_split

from phalanx.objects import open_store
from phalanx.planner.flops import token_flops
from phalanx.planner.gpus import GPUS
from phalanx.planner.job_search import model_shape
from phalanx.planner.mfu import mfu
from phalanx.spec import load_job

BUDGET_S = 400.0  # no row begins behind it
SAMPLE_S = 0.1
LARGE = {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192, "vocab_size": 32_768}
TINY = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": 512}

JOB = """
[job]
name = "gpu"
storage = "file://{folder}/{run}"
[model]
attn_backend = "{kernel}"
[model.args]
{model}
[data]
train = "file://{folder}/split"
document_mask = false
[training]
seq_len = {seq_len}
float8_recipe = "{recipe}"
steps = {steps}
global_batch_size = {windows}
[optimizer]
lr = 1e-4
[parallel]
local_batch_size = {windows}
[compile]
enable = {compile}
[checkpoint]
interval = 1_000_000
[metrics]
log_freq = 1
folder = "{folder}/{run}-metrics"
[cluster]
device = "{device}"
nproc = 1
"""


class Bench:
    """The rows, one after another; what each costs is a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._begun_s = options, time.monotonic()
        self._folder: Path = options.folder.absolute()
        is_large = options.device == "cuda"
        self.model, self.seq_len = (LARGE, 4096) if is_large else (TINY, 128)
        self.rows: list[dict[str, Any]] = []
        self._job: Path | None = None

    def prepare(self) -> None:
        """Random tokens, as a split of Phalanx's and as a flat file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tokens = np.random.default_rng(0).integers(0, self.model["vocab_size"], 4_000_000, dtype=np.uint16)
        tokens.tofile(self._folder / "tokens.bin")
        write_split(open_store(f"file://{self._folder}/split"), tokens, 1_000_000, self.model["vocab_size"])

    def row(self, name: str, measure: Callable[[], float]) -> None:
        """One row, unless the time is over; a command that fails is told and the others follow."""
        found: dict[str, Any] = {"row": name}
        self.rows.append(found)
        if time.monotonic() - self._begun_s > BUDGET_S:
            found["left_out"] = f"{BUDGET_S:g} s were over"
            print(f"{name}: left out, {found['left_out']}", flush=True)
            return
        try:
            with peak_memory(self._options.device) as peak:
                took_s = measure()
        except SystemExit as error:
            found["failed"] = str(error)[-2000:]
            print(f"{name}: failed\n{found['failed']}", flush=True)
            return
        rate = self._options.windows * self.seq_len / took_s
        found |= {"step_s": took_s, "tokens_per_s": rate, "mfu": self._mfu(rate), "memory_gib": peak[0]}
        shown_mfu = "unknown" if found["mfu"] is None else f"{found['mfu']:.1%}"
        print(f"{name}: {rate:,.0f} tokens/s, MFU {shown_mfu}, {peak[0]:.1f} GiB, {took_s:.4f} s a step", flush=True)

    def phalanx(self, kernel: str, *, compiled: bool, recipe: str = "none") -> float:
        """Seconds of the median step of `phalanx run`."""
        run = uuid.uuid4().hex[:8]
        path = self._folder / f"{run}.toml"
        path.write_text(
            JOB.format(
                folder=self._folder,
                run=run,
                kernel=kernel,
                model="\n".join(f"{key} = {value}" for key, value in self.model.items()),
                seq_len=self.seq_len,
                recipe=recipe,
                steps=self._options.steps,
                windows=self._options.windows,
                compile=str(compiled).lower(),
                device=self._options.device,
            )
        )
        self._job = path
        return step_s(steps_of([sys.executable, "-m", "phalanx.cli", "run", str(path)], {}, "gpu: step "))

    def bare(self, precision: str) -> float:
        """Seconds of the median step of gpu_bare.py."""
        script = str(Path(__file__).with_name("gpu_bare.py"))
        return step_s(steps_of([sys.executable, script, *self._settings(), precision], {}, "step "))

    def torchtitan(self, python: str) -> float:
        """Seconds of the median step of torchtitan_peer.py."""
        script = str(Path(__file__).with_name("torchtitan_peer.py"))
        settings, tokens, device = self._settings()
        command = [python, script, settings, tokens, "-", device]
        return step_s(steps_of(command, meeting(1)[0], "step "))

    def _settings(self) -> tuple[str, str, str]:
        """What the other loops are told: a file that says what is trained, the tokens, the device."""
        path = self._folder / f"{uuid.uuid4().hex[:8]}.json"
        given = {"model": self.model, "seq_len": self.seq_len, "batch": self._options.windows}
        path.write_text(json.dumps({**given, "steps": self._options.steps}))
        return str(path), str(self._folder / "tokens.bin"), self._options.device

    def _mfu(self, tokens_per_s: float) -> float | None:
        gpu = _gpu_kind() if self._options.device == "cuda" else None
        if gpu is None or self._job is None:
            return None
        flops = token_flops(model_shape(load_job(self._job)), self.seq_len, causal=True).model
        return mfu(flops, tokens_per_s, 1, GPUS[gpu].bf16_tflops)


def _gpu_kind() -> str | None:
    """The planner's name of the first GPU; None for one that it does not know."""
    shown = torch.cuda.get_device_name(0)
    return max((name for name in GPUS if name.split("-")[0] in shown), key=len, default=None)


@contextmanager
def peak_memory(device: str) -> Iterator[list[float]]:
    """The most memory, in GiB, that the first GPU gave out in the meantime, over what it had given out before."""
    peak, is_over = [0.0], threading.Event()
    if device != "cuda":
        yield peak
        return
    before = _used_gib()

    def watch() -> None:
        while not is_over.wait(SAMPLE_S):
            peak[0] = max(peak[0], _used_gib() - before)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield peak
    finally:
        is_over.set()
        watching.join()


def _used_gib() -> float:
    free, total = torch.cuda.mem_get_info(0)
    return float(total - free) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: expected one, or --device cpu to try the commands alone")
    if options.steps < 8:
        parser.error(f"--steps is {options.steps}: expected 8 or more, as the first 5 don't count")
    bench = Bench(options)
    bench.prepare()
    where = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
    print(f"{where}; {machine()}; torch {torch.__version__}", flush=True)
    measure(bench, options.device)
    tell_ratios({row["row"]: row["step_s"] for row in bench.rows if "step_s" in row})
    if options.json:
        options.json.write_text(json.dumps({"device": where, "rows": bench.rows}, indent=1))
    if any("failed" in row for row in bench.rows):
        raise SystemExit(1)


def measure(bench: Bench, device: str) -> None:
    """All rows, those that ratios are of first."""
    compiled = device == "cuda"
    bench.row("phalanx", lambda: bench.phalanx("sdpa", compiled=compiled))
    bench.row("bare loop", lambda: bench.bare("bf16"))
    if can_import(sys.executable, "torchao"):
        bench.row("phalanx, fp8", lambda: bench.phalanx("sdpa", compiled=compiled, recipe="tensorwise"))
        bench.row("bare loop, fp8", lambda: bench.bare("fp8"))
        bench.row("phalanx, fp8 by row", lambda: bench.phalanx("sdpa", compiled=compiled, recipe="rowwise"))
    else:
        print("fp8: torchao is not installed", flush=True)
    pythons = [python for python in (sys.executable, PEERS_PYTHON) if can_import(python, "torchtitan")]
    if pythons:
        bench.row("torchtitan", lambda: bench.torchtitan(pythons[0]))
    else:
        print("torchtitan is not installed", flush=True)
    for kernel in ("sdpa", "flex", "varlen") if device == "cuda" else ("varlen",):
        bench.row(f"phalanx, {kernel}, eager", lambda kernel=kernel: bench.phalanx(kernel, compiled=False))


def can_import(python: str, module: str) -> bool:
    """Whether an interpreter, if it is there at all, has a module."""
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return Path(python).exists() and not subprocess.run([python, "-c", find], check=False).returncode


def tell_ratios(step_s: Mapping[str, float]) -> None:
    """Of each pair of rows that were both measured. step_s: by row."""
    for words, slower, faster in (
        ("speed / bare loop", "bare loop", "phalanx"),
        ("speed / bare loop, both in fp8", "bare loop, fp8", "phalanx, fp8"),
        ("speed / torchtitan", "torchtitan", "phalanx"),
        ("fp8 / bf16", "phalanx", "phalanx, fp8"),
        ("fp8 by row / bf16", "phalanx", "phalanx, fp8 by row"),
        ("fp8 / bf16 of the bare loop", "bare loop", "bare loop, fp8"),
    ):
        if slower in step_s and faster in step_s:
            print(f"{words}: {step_s[slower] / step_s[faster]:.3f}", flush=True)


if __name__ == "__main__":
    main()
