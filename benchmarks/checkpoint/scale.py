"""A checkpoint of 16,384 ranks, a million boxes and 100,000 objects, simulated: Begin, reports and Commit through the
checkpoint service's own code on `file://`, then what ranks of another layout need to plan their restore.

Parts have the form of those that ranks write; tensor objects are files of the right size without data, as neither
commit nor planning reads them. Each phase runs in a process of its own, whose CPU time and peak memory are told.

Run: python benchmarks/checkpoint/scale.py [--ranks 16384] [--folder DIR]; prints one JSON line a phase.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from phalanx.checkpoint.commits import Commits
from phalanx.checkpoint.holds import Holds
from phalanx.checkpoint.jobs import HostedJob
from phalanx.checkpoint.retention import Policy
from phalanx.checkpoint.store import Database
from phalanx.core.box import Box
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest, keys
from phalanx.lineage.registry import JobName
from phalanx.objects import open_store
from phalanx.snapshot.index import read_needed
from phalanx.snapshot.parts import CHUNK_BYTES, Part, StoredBox, StoredObject, part_bytes
from phalanx.snapshot.together import plan

DIGEST = "sha256:" + "0" * 64
REF = CheckpointRef(1, 10)
STAGE_TENSORS, ROWS, COLUMNS, TP = 62, 8192, 8192, 8
GROUP = 128


def boxes_of(rank: int, num_ranks: int, pp: int) -> Iterator[tuple[str, Box]]:
    """What a rank holds: of each tensor of its stage a share of the rows (dp) of a share of the columns (tp)."""
    dp = num_ranks // (pp * TP)
    stage, rest = divmod(rank, dp * TP)
    row, column = divmod(rest, TP)
    stages = 16  # tensors are those of 16 stages, whatever the layout
    for number in range(STAGE_TENSORS * stages):
        if number * pp // (STAGE_TENSORS * stages) == stage:
            first, stop = ROWS * row // dp, ROWS * (row + 1) // dp
            box = Box((first, COLUMNS // TP * column), (stop - first, COLUMNS // TP))
            yield f"model.layers.{number // 9}.tensor{number % 9}.weight", box


def write(folder: Path, num_ranks: int) -> dict[str, object]:
    """The parts and objects of all ranks."""
    digests = iter(np.random.default_rng(0).integers(0, 1 << 63, 1 << 21, dtype=np.uint64).tolist())
    checkpoint = folder / keys.checkpoint(REF)
    for name in ("parts", "objects"):
        (checkpoint / name).mkdir(parents=True)
    num_boxes = num_objects = num_bytes = 0
    for rank in range(num_ranks):
        held = list(boxes_of(rank, num_ranks, 16))
        count = 6 + (rank * 100_000 // num_ranks - 6 * rank > (rank - 1) * 100_000 // num_ranks - 6 * (rank - 1))
        objects, boxes = [], []
        for at in range(count):
            key, start = keys.tensors(REF, keys.number(rank), at), 0
            for tensor, box in held[at * len(held) // count : (at + 1) * len(held) // count]:
                size = box.num_elements * 4
                chunks = tuple(f"{next(digests):016x}" for _ in range(-(-size // CHUNK_BYTES)))
                boxes.append(StoredBox(tensor, "float32", (ROWS, COLUMNS), box, key, start, CHUNK_BYTES, chunks))
                start += size
            objects.append(StoredObject(key, 4096 + start, f"xxh3:{rank:024x}{at:08x}", 4096))
            with (folder / key).open("wb") as file:
                file.truncate(4096 + start)
        data = part_bytes(Part(1, REF.step, rank, num_ranks, tuple(objects), tuple(boxes)))
        (folder / keys.part(REF, rank)).write_bytes(data)
        num_boxes, num_objects, num_bytes = num_boxes + len(boxes), num_objects + count, num_bytes + len(data)
    return {"ranks": num_ranks, "boxes": num_boxes, "objects": num_objects, "part_mb": round(num_bytes / 1e6, 1)}


def commit(folder: Path, num_ranks: int) -> dict[str, object]:
    """Begin and Commit by the service's code, with a database of its own."""
    job = HostedJob(JobName("p", "scale"), open_store(folder.as_uri()), Policy(), None)
    job.lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={})
    commits = Commits(Database(f"sqlite:///{folder}/checkpoint.sqlite", folder.as_uri()), Holds())
    commits.begin(job, REF)
    loader = LoaderState(REF.step, REF.step)
    draft = Manifest(1, REF.step, num_ranks, DIGEST, DIGEST, DIGEST, DIGEST, loader, {}, (), ())
    manifest = commits.commit(job, draft, 3600).result().manifest
    root = job.store.info(keys.manifest(REF)).num_bytes
    extra = [
        info.num_bytes for part in ("lists/", "directory/") for info in job.store.list(keys.checkpoint(REF) + part)
    ]
    return {"root_bytes": root, "lists": len(manifest.part_lists), "extra_mb": round(sum(extra) / 1e6, 1)}


def restore(folder: Path, num_ranks: int) -> dict[str, object]:
    """What ranks of another layout (8 stages, more dp) do before they read the first tensor; the slowest of three."""
    store = open_store(folder.as_uri())
    slowest = {"plan_s": 0.0, "index_mb": 0.0, "parts": 0.0}
    for rank in (0, num_ranks // 3, num_ranks - 1):
        first = rank // GROUP * GROUP
        everyone = [{name: [box] for name, box in boxes_of(first + at, num_ranks, 8)} for at in range(GROUP)]
        start = time.process_time()
        needed = everyone[rank - first]
        index = read_needed(store, Lineage(store).manifest(REF), needed)
        stored = [
            found
            for name, boxes in needed.items()
            for found in index.tensors[name].boxes
            if any(found.box.intersect(box) is not None for box in boxes)
        ]
        shared = plan(index, stored, everyone, rank - first)
        assert shared and len(index.objects) < 100_000
        took = {"plan_s": time.process_time() - start, "index_mb": index.num_bytes / 1e6}
        took["parts"] = len({key.rpartition("/")[2][:8] for key in index.objects})
        slowest = {name: max(slowest[name], value) for name, value in took.items()}
    return {name: round(value, 3) for name, value in slowest.items()}


PHASES = {"write": write, "commit": commit, "restore": restore}


def main() -> None:
    """All phases, or the one that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--phase", choices=list(PHASES))
    options = parser.parse_args()
    if options.phase is not None:
        start = time.perf_counter()
        found = PHASES[options.phase](options.folder, options.ranks)
        used = resource.getrusage(resource.RUSAGE_SELF)
        figures = {
            "wall_s": time.perf_counter() - start,
            "cpu_s": used.ru_utime + used.ru_stime,
            "peak_mb": used.ru_maxrss / 1000,
        }
        print(json.dumps({"phase": options.phase, **{k: round(v, 1) for k, v in figures.items()}, **found}), flush=True)
        return
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        for phase in PHASES:
            command = [
                sys.executable,
                __file__,
                "--phase",
                phase,
                "--folder",
                str(folder),
                "--ranks",
                str(options.ranks),
            ]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
