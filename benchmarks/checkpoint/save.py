"""Times one rank's checkpoint against a raw write of the same bytes: stall (capture), save to commit, restore.

Run: python benchmarks/checkpoint/save.py [--mb 500] [--folder DIR]; prints one JSON line a round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from phalanx.core.box import HeldTensor, whole
from phalanx.lineage import Lineage, LoaderState, Manifest
from phalanx.objects import open_store
from phalanx.snapshot import commit
from phalanx.snapshot.restore import restore
from phalanx.snapshot.writer import Writer

DIGEST = "sha256:" + "0" * 64


def raw_write_s(path: Path, tensors: list[HeldTensor]) -> float:
    """Seconds to write all tensors to one file and fsync it."""
    start = time.perf_counter()
    with path.open("wb") as file:
        for held in tensors:
            file.write(held.local.numpy().data)
        os.fsync(file.fileno())
    return time.perf_counter() - start


def main() -> None:
    """Three rounds on one state of fp32 tensors of 16 MiB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    shape = (2048, 2048)
    count = max(1, options.mb * 1_000_000 // (4 * 2048 * 2048))
    tensors = [HeldTensor(f"model.{n}", shape, whole(shape), torch.randn(shape)) for n in range(count)]
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measure(folder, tensors)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, tensors: list[HeldTensor]) -> None:
    """Prints the figures of three rounds; the first save also allocates the host buffer."""
    store = open_store(f"file://{folder}/job")
    lineage = Lineage(store)
    attempt = lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={}).number
    writer = Writer(store, 0, 1)
    num_bytes = sum(held.local.numel() * 4 for held in tensors)
    for step in range(1, 4):
        raw_s = raw_write_s(folder / f"raw{step}", tensors)
        start = time.perf_counter()
        pending = writer.save(attempt, step, tensors)
        stall_s = time.perf_counter() - start
        pending.wait(600)
        draft = Manifest(attempt, step, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(step, step), {}, (), ())
        manifest = commit(lineage, store, draft, 1, 60)
        commit_s = time.perf_counter() - start
        start = time.perf_counter()
        restore(store, manifest, tensors)
        restore_s = time.perf_counter() - start
        figures = {"raw_write_s": raw_s, "stall_s": stall_s, "save_to_commit_s": commit_s, "restore_s": restore_s}
        print(json.dumps({"mb": num_bytes // 1_000_000, "round": step, **{k: round(v, 3) for k, v in figures.items()}}))


if __name__ == "__main__":
    main()
