"""Windows from a warm local disk, 16 x 2048 a batch, in one process without workers: Phalanx beside a bare numpy memmap
loop and litdata. Rounds are interleaved (one pass of each in turn), medians are printed.

python benchmarks/data/local.py FOLDER [--litdata PYTHON] [--shards 6] [--rounds 7]
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from corpus import BATCH, SEQ_LEN, flat_tokens, machine, order_of, write_split
from numpy.typing import NDArray

from phalanx.objects import open_store
from phalanx.stream import WindowReader, open_split
from phalanx.stream.windows import WindowBatch
from phalanx.trainer.widen import to_device

CPU = torch.device("cpu")
Pass = Callable[[], int]
Side = Callable[[], tuple[float, float]]  # samples a second, and samples a second of this process's CPU time


def memmap_inputs(tokens: NDArray[np.uint16], count: int) -> Pass:
    """What is called a bare memmap loop: random offsets, inputs as int64 [16, 2048]."""
    draw = np.random.default_rng(0)

    def one() -> int:
        for _ in range(count // BATCH):
            starts = draw.integers(0, len(tokens) - SEQ_LEN - 1, BATCH)
            np.stack([tokens[start : start + SEQ_LEN].astype(np.int64) for start in starts])
        return count

    return one


def memmap_both(tokens: NDArray[np.uint16], count: int) -> Pass:
    """As nanoGPT does: inputs and targets as int64 tensors."""

    def one() -> int:
        for _ in range(count // BATCH):
            starts = torch.randint(len(tokens) - SEQ_LEN - 1, (BATCH,))
            torch.stack([torch.from_numpy(tokens[i : i + SEQ_LEN].astype(np.int64)) for i in starts])
            torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + SEQ_LEN].astype(np.int64)) for i in starts])
        return count

    return one


def phalanx(reader: WindowReader, count: int, use: Callable[[WindowBatch], object]) -> Pass:
    """The next `count` windows in order, each batch handed to `use`."""
    position = 0

    def positions() -> Iterator[NDArray[np.int64]]:
        nonlocal position
        for _ in range(count // BATCH):
            yield np.arange(position, position + BATCH)
            position += BATCH

    def one() -> int:
        for batch in reader.batches(positions()):
            use(batch)
        return count

    return one


def measured(one: Pass) -> Side:
    """One pass, timed."""

    def rate() -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        count = one()
        return count / (time.perf_counter() - start), count / (time.process_time() - cpu)

    return rate


def litdata(python: str, tokens_file: Path, folder: Path) -> Side:
    """One pass of the peer's process, timed by itself."""
    script = Path(__file__).parent / "litdata_peer.py"
    command = [python, str(script), str(tokens_file), str(folder)]
    peer = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert peer.stdin is not None and peer.stdout is not None
    while peer.stdout.readline().strip() != "ready":
        assert peer.poll() is None, "litdata did not start"

    def rate() -> tuple[float, float]:
        assert peer.stdin is not None and peer.stdout is not None
        peer.stdin.write("go\n")
        peer.stdin.flush()
        wall, cpu = peer.stdout.readline().split()
        return float(wall), float(cpu)

    return rate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--litdata")
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    tokens = flat_tokens(options.folder, options.shards)
    count = len(tokens) // SEQ_LEN // BATCH * BATCH
    store = open_store(f"file://{options.folder.absolute()}/split-{options.shards}")
    write_split(store, tokens)
    split = open_split(store)

    def reader() -> WindowReader:
        return WindowReader(store, split, order_of(store, split), True, reads_ahead=True)

    sides: dict[str, Side] = {
        "memmap loop: int64 inputs": measured(memmap_inputs(tokens, count)),
        "phalanx: hand-off (uint16, boundaries, records)": measured(phalanx(reader(), count, lambda batch: batch)),
        "memmap loop as nanoGPT: int64 inputs and targets": measured(memmap_both(tokens, count)),
        "phalanx: widened (4 int64 tensors, records)": measured(
            phalanx(reader(), count, lambda batch: to_device(batch.packed, 1, CPU))
        ),
    }
    if options.litdata:
        peer = litdata(options.litdata, options.folder / f"tokens-{options.shards}.bin", options.folder / "litdata")
        sides = {"litdata: 16-bit inputs": peer, **sides}
    print(f"{machine()}; torch {torch.__version__}; {count} windows a pass, {options.rounds} rounds")
    for rate in sides.values():
        rate()
    rounds = [{name: rate() for name, rate in sides.items()} for _ in range(options.rounds)]
    print(f"afterwards: {machine()}")
    ours = "phalanx: hand-off (uint16, boundaries, records)"
    for name in sides:
        wall, cpu = zip(*(each[name] for each in rounds), strict=True)
        ratios = [median(each[ours][kind] / each[name][kind] for each in rounds) for kind in (0, 1)]
        print(
            f"{name}: {median(wall):,.0f} samples/s ({min(wall):,.0f} to {max(wall):,.0f}), {median(cpu):,.0f} a CPU "
            f"second; the hand-off is {ratios[0]:.2f} x this, {ratios[1]:.2f} x by CPU time"
        )


if __name__ == "__main__":
    main()
