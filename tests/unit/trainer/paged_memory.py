"""Prints, as JSON, by how many bytes the resident memory of this process grows at most in each thing that is done with
an optimizer's state, in memory or on a disk. A process of its own, as memory that was used before is used again.

python paged_memory.py FOLDER none|nvme BUDGET_BYTES NUM_PARAMETERS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from phalanx.core.box import HeldTensor, whole
from phalanx.lineage import Lineage, LoaderState, Manifest
from phalanx.objects import open_store
from phalanx.parallel.replicas import ReplicaLink
from phalanx.snapshot import commit
from phalanx.snapshot.restore import restore
from phalanx.snapshot.writer import Writer
from phalanx.spec import parse_job
from phalanx.trainer.optimizer import optimizer_of

COLUMNS = 1024
DIGEST = "sha256:" + "0" * 64


def resident_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(name))


def growth(act: Callable[[], object]) -> int:
    """The most by which resident memory exceeds, while `act` runs, what it is now."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS:")
    act()
    return resident_bytes("VmHWM:") - before


def main() -> None:
    folder, place, budget_bytes, num_parameters = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    shape = (num_parameters // COLUMNS, COLUMNS)
    on_disk = {"offload": "nvme", "offload_folder": str(folder / "disk"), "offload_gib": budget_bytes / 2**30}
    job = parse_job(
        {
            "job": {"name": "memory", "storage": "memory://memory"},
            "model": {"preset": "tiny"},
            "data": {"train": "memory://memory/train"},
            "training": {"seq_len": 8, "steps": 1, "global_batch_size": 1},
            "optimizer": {"lr": 0.1, **(on_disk if place == "nvme" else {})},
        }
    )
    held = [HeldTensor("w", shape, whole(shape), torch.randn(shape))]
    gradient = torch.randn(shape)
    store = open_store(f"file://{folder}/store")
    attempt = Lineage(store).open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={}, avoid=()).number
    told: dict[str, int] = {}
    optimizer = None

    def train() -> None:
        nonlocal optimizer
        optimizer = optimizer_of(job, held, ReplicaLink(None))
        for _ in range(2):
            optimizer.update([gradient], 2.0, 1.0)

    told["update"] = growth(train)
    assert optimizer is not None
    state = optimizer.state()
    told["save"] = growth(lambda: Writer(store, 0, 1).save(attempt, 1, state).wait(100))
    draft = Manifest(attempt, 1, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(1, 1), {}, (), ())
    manifest = commit(Lineage(store), store, draft, 1, 30)
    told["restore"] = growth(lambda: restore(store, manifest, state))
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
