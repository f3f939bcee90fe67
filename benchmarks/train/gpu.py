"""A 1-billion-class decoder on one GPU: tokens/s, MFU (docs/mfu.md) and memory of `phalanx run` with compiled layers,
and beside it a bare PyTorch loop, both in bf16 and, where torchao is installed, with fp8 products; of torchtitan's
trainer, where that is installed here or in .venv-peers; and of each attention kernel without compilation. Then the
ratios: of Phalanx to the bare loop and to torchtitan, of fp8 to bf16.

Needs torch with CUDA and this repository (`pip install -e '.[train]'`), nothing else. Ends within 8 minutes: what has
not begun or ended by then is left out, and said so. Where the GPU's memory is too small for a step's windows, half as
many are tried, and the later rows take as many as the first one could. `--device cpu` runs a tiny model through the
same commands, uncompiled, to see that they work; its figures say nothing.

OMP_NUM_THREADS=8 python benchmarks/train/gpu.py FOLDER [--steps 20] [--windows 4] [--peak-tflops X] [--json FILE]
--peak-tflops: the printed peak of dense bf16 products, where the GPU is none of those that `phalanx plan` knows.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sides import PEERS_PYTHON, WARM, TookTooLong, median_step, meeting, steps_of

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from corpus import machine, write_split

from phalanx.objects import open_store
from phalanx.planner.flops import token_flops
from phalanx.planner.gpus import GPUS, Gpu
from phalanx.planner.job_search import model_shape
from phalanx.planner.mfu import mfu
from phalanx.spec import load_job

LIMIT_S = 465.0  # of all rows together
SHORTEST_ROW_S = 30.0  # none begins with less than this left
SAMPLE_S = 0.1
OTHERS_GIB = 2.0  # of the GPU's memory, that are no mere context
FP8_CAPABILITY = (8, 9)
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)
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
train = "file://{folder}/split-{vocab_size}"
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


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a row. windows: of a step. limit_s: after which it is ended."""

    windows: int
    limit_s: float


class Bench:
    """The rows, one after another; what each costs is a process of its own."""

    def __init__(self, options: argparse.Namespace, peak_tflops: float | None) -> None:
        self._options, self._peak_tflops, self._begun_s = options, peak_tflops, time.monotonic()
        self._folder: Path = options.folder.absolute()
        self.model, self.seq_len = (LARGE, 4096) if options.device == "cuda" else (TINY, 128)
        self.rows: list[dict[str, Any]] = []
        self._windows: int = options.windows

    def prepare(self) -> None:
        """Random tokens, as a split of Phalanx's and as a flat file."""
        vocab_size = self.model["vocab_size"]
        tokens = np.random.default_rng(0).integers(0, vocab_size, 4_000_000, dtype=np.uint16)
        tokens.tofile(self._folder / f"tokens-{vocab_size}.bin")
        write_split(open_store(f"file://{self._folder}/split-{vocab_size}"), tokens, 1_000_000, vocab_size)

    def row(self, name: str, measure: Callable[[Trial], float]) -> None:
        """One row; one that fails is told and the others follow. The windows of the first that runs hold for all."""
        is_first = not any("step_s" in row for row in self.rows)
        found: dict[str, Any] = {"row": name}
        self.rows.append(found)
        try:
            took_s, windows, peak_gib = self._fitting(name, measure)
        except TookTooLong as late:
            found["left_out"] = f"{LIMIT_S:.0f} s for all rows were over"
            print(f"{name}: left out, as {found['left_out']}\n{str(late)[-500:]}", flush=True)
        except SystemExit as error:
            found["failed"] = str(error)[-2000:]
            print(f"{name}: failed\n{found['failed']}", flush=True)
        else:
            self._windows = windows if is_first else self._windows
            rate = windows * self.seq_len / took_s
            found |= {"step_s": took_s, "windows": windows, "tokens_per_s": rate}
            found |= {"mfu": self._mfu(rate), "memory_gib": peak_gib}
            self._tell(found)

    def _fitting(self, name: str, measure: Callable[[Trial], float]) -> tuple[float, int, float]:
        """A step's seconds, its windows, and GiB of GPU memory, with the most windows that fit of the bench's, their
        half, and so on. Raises TookTooLong and SystemExit as `steps_of`.
        """
        windows = self._windows
        while True:
            left_s = LIMIT_S - (time.monotonic() - self._begun_s)
            if left_s < SHORTEST_ROW_S:
                raise TookTooLong("")
            try:
                with peak_memory(self._options.device) as peak:
                    took_s = measure(Trial(windows, left_s))
                return took_s, windows, peak[0]
            except TookTooLong:
                raise
            except SystemExit as error:
                if windows == 1 or not OUT_OF_MEMORY.search(str(error)):
                    raise
            print(f"{name}: out of memory with {windows} windows a step, {windows // 2} are tried", flush=True)
            windows //= 2

    def _tell(self, found: Mapping[str, Any]) -> None:
        shown_mfu = "unknown" if found["mfu"] is None else f"{found['mfu']:.1%}"
        print(
            f"{found['row']}: {found['tokens_per_s']:,.0f} tokens/s, MFU {shown_mfu}, {found['memory_gib']:.1f} GiB, "
            f"{found['step_s']:.4f} s a step of {found['windows']} windows",
            flush=True,
        )

    def phalanx(self, trial: Trial, kernel: str, *, compiled: bool, recipe: str = "none") -> float:
        """Seconds of the median step of `phalanx run`."""
        path = self._job(trial.windows, kernel, compiled=compiled, recipe=recipe)
        return self._timed([sys.executable, "-m", "phalanx.cli", "run", str(path)], {}, "gpu: step ", trial)

    def bare(self, trial: Trial, precision: str) -> float:
        """Seconds of the median step of gpu_bare.py."""
        script = str(Path(__file__).with_name("gpu_bare.py"))
        return self._timed([sys.executable, script, *self._settings(trial), precision], {}, "step ", trial)

    def torchtitan(self, trial: Trial, python: str) -> float:
        """Seconds of the median step of torchtitan_peer.py."""
        script = str(Path(__file__).with_name("torchtitan_peer.py"))
        settings, tokens, device = self._settings(trial)
        return self._timed([python, script, settings, tokens, "-", device], meeting(1)[0], "step ", trial)

    def _timed(self, command: Sequence[str], environ: Mapping[str, str], mark: str, trial: Trial) -> float:
        return median_step(steps_of(command, environ, mark, limit_s=trial.limit_s))[0]

    def _job(self, windows: int, kernel: str, *, compiled: bool, recipe: str) -> Path:
        """The job's file, under a fresh name."""
        run = uuid.uuid4().hex[:8]
        path = self._folder / f"{run}.toml"
        path.write_text(
            JOB.format(
                folder=self._folder,
                run=run,
                kernel=kernel,
                model="\n".join(f"{key} = {value}" for key, value in self.model.items()),
                vocab_size=self.model["vocab_size"],
                seq_len=self.seq_len,
                recipe=recipe,
                steps=self._options.steps,
                windows=windows,
                compile=str(compiled).lower(),
                device=self._options.device,
            )
        )
        return path

    def _settings(self, trial: Trial) -> tuple[str, str, str]:
        """What the other loops are told: a file that says what is trained, the tokens, the device."""
        path = self._folder / f"{uuid.uuid4().hex[:8]}.json"
        given = {"model": self.model, "seq_len": self.seq_len, "batch": trial.windows}
        path.write_text(json.dumps({**given, "steps": self._options.steps}))
        return str(path), str(self._folder / f"tokens-{self.model['vocab_size']}.bin"), self._options.device

    def _mfu(self, tokens_per_s: float) -> float | None:
        if self._peak_tflops is None:
            return None
        job = load_job(self._job(1, "sdpa", compiled=False, recipe="none"))
        flops = token_flops(model_shape(job), self.seq_len, causal=True).model
        return mfu(flops, tokens_per_s, 1, self._peak_tflops)


def gpu_kind(shown: str) -> Gpu | None:
    """The planner's GPU of the name that torch shows; None for one that it does not know. Of the cards with fewer
    watts than the modules that it knows (PCIe, NVL), only the A100 has a printed peak like theirs.
    """
    words = set(re.split(r"[\s-]+", shown.upper()))
    kinds = [gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in words]
    if words & {"PCIE", "NVL"} and "A100" not in words:
        return None
    return max(kinds, key=lambda gpu: gpu.memory_mib, default=None)


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
    options, parser = _options()
    where = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
    print(f"{where}; {machine()}; torch {torch.__version__}", flush=True)
    bench = Bench(options, _peak_tflops(options, where))
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        bench.prepare()
        if options.json:
            options.json.touch()
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}: expected a folder and a file that can be written")
    measure(bench, options.device)
    ratios = tell_ratios({row["row"]: row for row in bench.rows if "step_s" in row})
    if options.json:
        options.json.write_text(json.dumps({"device": where, "rows": bench.rows, "ratios": ratios}, indent=1))
    if any("failed" in row for row in bench.rows):
        raise SystemExit(1)


def _options() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--peak-tflops", type=float, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: expected one, or --device cpu to try the commands alone")
    if options.steps < WARM + 3:
        parser.error(f"--steps is {options.steps}: expected {WARM + 3} or more, as the first {WARM} don't count")
    if options.windows < 1:
        parser.error(f"--windows is {options.windows}: expected 1 or more")
    if options.peak_tflops is not None and not options.peak_tflops > 0:
        parser.error(f"--peak-tflops is {options.peak_tflops}: expected a positive number of 10^12 operations a second")
    return options, parser


def _peak_tflops(options: argparse.Namespace, where: str) -> float | None:
    """What MFU is a share of, told; on a CPU nothing."""
    if options.device == "cpu":
        return None
    gib = _used_gib()
    if gib > OTHERS_GIB:
        print(f"{gib:.1f} GiB of this GPU are in use already: what else runs on it is in the figures", flush=True)
    if options.peak_tflops is not None:
        print(f"peak {options.peak_tflops:g} TFLOP/s, as --peak-tflops says", flush=True)
        return float(options.peak_tflops)
    kind = gpu_kind(where)
    if kind is None:
        print(f"peak of {where} not known: MFU needs --peak-tflops with the one of its data sheet", flush=True)
        return None
    print(f"peak {kind.bf16_tflops:g} TFLOP/s, of {kind.name}", flush=True)
    return kind.bf16_tflops


def measure(bench: Bench, device: str) -> None:
    """All rows, those that ratios are of first."""
    ours = partial(bench.phalanx, kernel="sdpa", compiled=device == "cuda")
    bench.row("phalanx", ours)
    bench.row("bare loop", partial(bench.bare, precision="bf16"))
    pythons = [python for python in (sys.executable, PEERS_PYTHON) if can_import(python, "torchtitan")]
    if pythons:
        bench.row("torchtitan", partial(bench.torchtitan, python=pythons[0]))
    else:
        print("torchtitan: not installed", flush=True)
    lack = lack_of_fp8(device)
    if lack is None:
        bench.row("phalanx, fp8", partial(ours, recipe="tensorwise"))
        bench.row("bare loop, fp8", partial(bench.bare, precision="fp8"))
        bench.row("phalanx, fp8 by row", partial(ours, recipe="rowwise"))
    else:
        print(f"fp8: {lack}", flush=True)
    for kernel in ("sdpa", "flex", "varlen") if device == "cuda" else ("varlen",):
        bench.row(f"phalanx, {kernel}, eager", partial(bench.phalanx, kernel=kernel, compiled=False))


def lack_of_fp8(device: str) -> str | None:
    """Why there are no rows with fp8 products; None where there are."""
    if not can_import(sys.executable, "torchao"):
        return "torchao is not installed: pip install -e '.[train,fp8]'"
    if device == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (torch.cuda.get_device_capability(), FP8_CAPABILITY))
        return f"this GPU has compute capability {found}, and products in fp8 need {least}"
    return None


def can_import(python: str, module: str) -> bool:
    """Whether an interpreter, if it is there at all, has a module."""
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return Path(python).exists() and not subprocess.run([python, "-c", find], check=False).returncode


def tell_ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Of tokens a second, of each pair of rows that were both measured; told, and returned. rows: by name."""
    ratios = {}
    for words, slower, faster in (
        ("speed / bare loop", "bare loop", "phalanx"),
        ("speed / bare loop, both in fp8", "bare loop, fp8", "phalanx, fp8"),
        ("speed / torchtitan", "torchtitan", "phalanx"),
        ("fp8 / bf16", "phalanx", "phalanx, fp8"),
        ("fp8 by row / bf16", "phalanx", "phalanx, fp8 by row"),
        ("fp8 / bf16 of the bare loop", "bare loop", "bare loop, fp8"),
    ):
        if slower not in rows or faster not in rows:
            continue
        ratios[words] = rows[faster]["tokens_per_s"] / rows[slower]["tokens_per_s"]
        windows = rows[faster]["windows"], rows[slower]["windows"]
        apart = f" (of steps of {windows[0]} and {windows[1]} windows)" if windows[0] != windows[1] else ""
        print(f"{words}: {ratios[words]:.3f}{apart}", flush=True)
    return ratios


if __name__ == "__main__":
    main()
