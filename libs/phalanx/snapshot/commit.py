"""Commits a checkpoint: awaits the parts of all ranks, checks them together, then has the lineage put the manifest.

Until that one create-only put the checkpoint does not exist; after it, it is whole. Whoever commits may die anywhere:
what is left is parts and objects that no manifest names.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from phalanx.core.digest import xxh3
from phalanx.lineage import Lineage, Manifest, ObjectRef, keys
from phalanx.objects import ObjectStore
from phalanx.snapshot.coverage import coverage_fault
from phalanx.snapshot.errors import IncompleteCheckpoint
from phalanx.snapshot.index import NUM_READERS, Index, build_index
from phalanx.snapshot.parts import Part, parse_part

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 0.5


def commit(
    lineage: Lineage,
    store: ObjectStore,
    draft: Manifest,
    world_size: int,
    deadline_s: float,
    *,
    expected: Mapping[int, ObjectRef] | None = None,
) -> Manifest:
    """Makes the checkpoint of `draft` (its attempt and step; its `parts` are filled in here) exist. Returns the
    manifest as stored.

    store: rooted at the job, as the lineage is. expected: parts as their ranks reported them, checked against what is
    stored; for a committer that hears from ranks, which `trainer.storage_control` does not. Raises IncompleteCheckpoint
    where parts don't come within `deadline_s`, or don't make a whole checkpoint together.
    """
    part_keys = [keys.part(draft.ref, rank) for rank in range(world_size)]
    _await_parts(store, draft, part_keys, deadline_s)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        read = list(pool.map(lambda key: _read(store, key), part_keys))
    refs, parts = tuple(ref for ref, _ in read), [part for _, part in read]
    _check_parts(draft, parts, refs, world_size, expected or {})
    index = build_index(parts)
    _check_objects(store, draft, index)
    _check_coverage(draft, index)
    records = draft.records + tuple(ref for part in parts for ref in part.records)
    manifest = dataclasses.replace(draft, parts=refs, records=records, world_size=world_size)
    lineage.commit(manifest)
    return manifest


def _await_parts(store: ObjectStore, draft: Manifest, part_keys: list[str], deadline_s: float) -> None:
    """Returns when all keys are listed; polls with growing pauses."""
    end = time.monotonic() + deadline_s
    pause_s = _FIRST_WAIT_S
    while True:
        present = {info.key for info in store.list(keys.parts(draft.ref))}
        missing = [rank for rank, key in enumerate(part_keys) if key not in present]
        if not missing:
            return
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise IncompleteCheckpoint(
                f"checkpoint {draft.ref}: no part of ranks {_some(missing)} within {deadline_s:g} s"
            )
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, _LONGEST_WAIT_S)


def _read(store: ObjectStore, key: str) -> tuple[ObjectRef, Part]:
    data = store.read(key)
    return ObjectRef(key, len(data), xxh3(data)), parse_part(key, data)


def _check_parts(
    draft: Manifest, parts: list[Part], refs: tuple[ObjectRef, ...], world_size: int, expected: Mapping[int, ObjectRef]
) -> None:
    for part, ref in zip(parts, refs, strict=True):
        if part.world_size != world_size:
            raise IncompleteCheckpoint(f"{ref.key} was written in a world of {part.world_size} ranks, not {world_size}")
        if expected.get(part.rank, ref) != ref:
            raise IncompleteCheckpoint(
                f"{ref.key} is not the part that rank {part.rank} reported for step {draft.step}"
            )


def _check_objects(store: ObjectStore, draft: Manifest, index: Index) -> None:
    sizes = {info.key: info.num_bytes for info in store.list(keys.objects(draft.ref))}
    for item in index.objects.values():
        if sizes.get(item.key) != item.num_bytes:
            found = f"has {sizes[item.key]} bytes" if item.key in sizes else "is missing"
            raise IncompleteCheckpoint(f"{item.key} {found}, its part says {item.num_bytes} bytes")


def _check_coverage(draft: Manifest, index: Index) -> None:
    for tensor in index.tensors.values():
        fault = coverage_fault(tensor.global_shape, [stored.box for stored in tensor.boxes])
        if fault is not None:
            raise IncompleteCheckpoint(f"checkpoint {draft.ref}: tensor {tensor.name}: {fault}")


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
