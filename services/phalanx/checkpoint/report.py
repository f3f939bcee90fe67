"""What a job's store says about its checkpoints: live ones, dead ones and why, and the content of one. Plain values for
tables and JSON.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.checkpoint.retention import why_dead
from phalanx.lineage import Attempt, CheckpointRef, DamagedObject, Lineage, Manifest, keys
from phalanx.objects import ObjectStore
from phalanx.snapshot.dtypes import DTYPES
from phalanx.snapshot.index import Index

_REMOVED = "removed to save space; its step records stay"


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint in a list. why_dead: None for a live one. num_bytes: of everything stored for it."""

    attempt: int
    step: int
    num_bytes: int
    world_size: int | None
    why_dead: str | None


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_boxes: int


def checkpoint_rows(store: ObjectStore, *, dead: bool) -> list[CheckpointRow]:
    """All live checkpoints, and with `dead` also the committed ones off the live chain and the saves without a
    manifest.
    """
    lineage = Lineage(store)
    chain, attempts = lineage.chain(), lineage.attempts()
    live = set(lineage.checkpoints())
    rows: list[CheckpointRow] = []
    for attempt in attempts:
        sizes, committed, retired = _sizes(store, attempt)
        for ref, num_bytes in sorted(sizes.items()):
            if ref in committed:
                why = None if ref in live else why_dead(ref, attempts, chain)
            else:
                why = _REMOVED if ref in retired else "never committed: it has no manifest"
            if why is None or dead:
                world_size, damage = _world_size(lineage, ref) if ref in committed else (None, None)
                rows.append(CheckpointRow(ref.attempt, ref.step, num_bytes, world_size, why or damage))
    return sorted(rows, key=lambda row: (row.attempt, row.step))


def tensor_rows(index: Index) -> list[TensorRow]:
    """The tensors of a checkpoint, by name."""
    return [
        TensorRow(name, t.dtype, t.global_shape, math.prod(t.global_shape) * DTYPES[t.dtype].itemsize, len(t.boxes))
        for name, t in index.tensors.items()
    ]


def ancestry(lineage: Lineage, manifest: Manifest) -> list[CheckpointRef]:
    """The checkpoints that the attempt of `manifest` started from, nearest first, back to the beginning."""
    attempts = {attempt.number: attempt for attempt in lineage.attempts()}
    found: list[CheckpointRef] = []
    parent = attempts[manifest.attempt].parent
    while parent is not None:
        found.append(parent)
        parent = attempts[parent.attempt].parent
    return found


def _sizes(
    store: ObjectStore, attempt: Attempt
) -> tuple[dict[CheckpointRef, int], set[CheckpointRef], set[CheckpointRef]]:
    """Bytes stored for each save of `attempt`; which of them have a manifest, and which had one."""
    sizes: dict[CheckpointRef, int] = {}
    committed: set[CheckpointRef] = set()
    retired: set[CheckpointRef] = set()
    for info in store.list(keys.checkpoints_of(attempt.number)):
        ref = keys.checkpoint_of(info.key)
        if ref is not None:
            sizes[ref] = sizes.get(ref, 0) + info.num_bytes
            committed |= {ref} if keys.manifest_ref(info.key) else set()
            retired |= {ref} if keys.retired_ref(info.key) else set()
    return sizes, committed, retired


def _world_size(lineage: Lineage, ref: CheckpointRef) -> tuple[int | None, str | None]:
    try:
        return lineage.manifest(ref).world_size, None
    except DamagedObject as error:
        return None, str(error)
