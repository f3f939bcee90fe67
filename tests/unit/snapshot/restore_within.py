"""A process that restores a tensor into pages of a file under a hard limit of memory.

python restore_within.py STORE FOLDER ROWS COLUMNS FIRST COUNT BUDGET_BYTES LIMIT_BYTES

Of the checkpoint of attempt 1, step 5, its tensor `t`, fp32 [ROWS, COLUMNS], the columns [FIRST, FIRST + COUNT). Prints
a digest of what the pages then hold. The limit is of private memory that is written to, over what the process had
before (RLIMIT_DATA).
"""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path

import torch
import xxhash

from phalanx.core.box import Box, HeldTensor
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import open_store
from phalanx.paging.state import PagedState
from phalanx.snapshot.restore import restore


def held_bytes() -> int:
    """Private memory of this process that can be written to."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) << 10


def main(url: str, folder: str, *numbers: str) -> None:
    rows, columns, first, count, budget_bytes, limit_bytes = map(int, numbers)
    threading.stack_size(256 << 10)
    state = PagedState(Path(folder), [rows * count], 1, budget_bytes)
    box = Box((0, first), (rows, count))
    local = torch.empty(box.shape, device="meta")
    held = HeldTensor("t", (rows, columns), box, local, paged=state.tensor(0, 0))
    store = open_store(url)
    manifest = Lineage(store).manifest(CheckpointRef(1, 5))
    limit = held_bytes() + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    restore(store, manifest, [held])
    digest = xxhash.xxh3_64()
    state.pin()
    for piece in state.tensor(0, 0).pieces(0, rows * count):
        digest.update(piece)
    sys.stdout.write(digest.hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
