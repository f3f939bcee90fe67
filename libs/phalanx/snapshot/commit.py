"""Commits a checkpoint: awaits the parts of all ranks, checks them together, then has the lineage put the manifest.

Until that one create-only put the checkpoint does not exist; after it, it is whole. Whoever commits may die anywhere:
what is left is parts and objects that no manifest names. A world of many ranks has lists and a directory before it
(`root_of`), which are nothing without it either.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phalanx.core.digest import xxh3
from phalanx.lineage import Lineage, Manifest, ObjectRef, keys
from phalanx.lineage.lists import MOST_NAMED, encoded_lists
from phalanx.objects import ObjectStore
from phalanx.snapshot.directory import put_directory
from phalanx.snapshot.errors import IncompleteCheckpoint
from phalanx.snapshot.index import NUM_PART_READERS, PARTS_AT_ONCE
from phalanx.snapshot.parts import Part, parse_part
from phalanx.snapshot.tally import Tally

FILLED_IN = ("parts", "records", "part_lists", "record_lists", "directory")  # what a commit adds to its draft
_FIRST_WAIT_S, _LONGEST_WAIT_S, _WAIT_SHARE = 0.01, 0.5, 0.1


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
    sizes = {info.key: info.num_bytes for info in store.list(keys.objects(draft.ref))}
    refs: list[ObjectRef] = []
    records, tally = list(draft.records), Tally()
    for ref, part in _read_parts(store, part_keys):
        _check_part(draft, part, ref, world_size, expected or {})
        _check_objects(part, sizes)
        tally.add(part)
        refs.append(ref)
        records += part.records
    _check_coverage(draft, tally)
    manifest = root_of(lineage, dataclasses.replace(draft, world_size=world_size), refs, records, tally)
    lineage.commit(manifest)
    return manifest


def root_of(
    lineage: Lineage, draft: Manifest, parts: Sequence[ObjectRef], records: Sequence[ObjectRef], tally: Tally
) -> Manifest:
    """The draft with its parts and records. Where they are many, lists of them and the directory are stored first, all
    of them named by their own content, so that they are the same for whoever commits; then the root names those.
    """
    named: dict[str, Any] = {"parts": tuple(parts), "records": tuple(records)}
    if len(records) > MOST_NAMED:
        lists = (lineage.put(keys.record_list(draft.attempt, xxh3(data)), data) for data in encoded_lists(records))
        named |= {"records": (), "record_lists": tuple(lists)}
    if len(parts) > MOST_NAMED:
        lists = (lineage.put(keys.part_list(draft.ref, xxh3(data)), data) for data in encoded_lists(parts))
        directory = put_directory(tally.tables, lambda data: lineage.put(keys.directory(draft.ref, xxh3(data)), data))
        named |= {"parts": (), "part_lists": tuple(lists), "directory": directory}
    return dataclasses.replace(draft, **named)


def _await_parts(store: ObjectStore, draft: Manifest, part_keys: list[str], deadline_s: float) -> None:
    """Returns when all keys are listed; polls, so that a part is seen at most a tenth later than it took to come."""
    start = time.monotonic()
    while True:
        present = {info.key for info in store.list(keys.parts(draft.ref))}
        missing = [rank for rank, key in enumerate(part_keys) if key not in present]
        if not missing:
            return
        waited_s = time.monotonic() - start
        left_s = deadline_s - waited_s
        if left_s <= 0:
            raise IncompleteCheckpoint(
                f"checkpoint {draft.ref}: no part of ranks {_some(missing)} within {deadline_s:g} s"
            )
        time.sleep(min(max(_FIRST_WAIT_S, _WAIT_SHARE * waited_s), _LONGEST_WAIT_S, left_s))


def _read_parts(store: ObjectStore, part_keys: Sequence[str]) -> Iterator[tuple[ObjectRef, Part]]:
    """All parts in order, a few at a time: together they may be larger than memory."""
    with ThreadPoolExecutor(NUM_PART_READERS) as pool:
        for first in range(0, len(part_keys), PARTS_AT_ONCE):
            for key, data in pool.map(lambda key: (key, store.read(key)), part_keys[first : first + PARTS_AT_ONCE]):
                yield ObjectRef(key, len(data), xxh3(data)), parse_part(key, data)


def _check_part(
    draft: Manifest, part: Part, ref: ObjectRef, world_size: int, expected: Mapping[int, ObjectRef]
) -> None:
    if part.world_size != world_size:
        raise IncompleteCheckpoint(f"{ref.key} was written in a world of {part.world_size} ranks, not {world_size}")
    if expected.get(part.rank, ref) != ref:
        raise IncompleteCheckpoint(f"{ref.key} is not the part that rank {part.rank} reported for step {draft.step}")


def _check_objects(part: Part, sizes: Mapping[str, int]) -> None:
    for item in part.objects:
        if sizes.get(item.key) != item.num_bytes:
            found = f"has {sizes[item.key]} bytes" if item.key in sizes else "is missing"
            raise IncompleteCheckpoint(f"{item.key} {found}, its part says {item.num_bytes} bytes")


def _check_coverage(draft: Manifest, tally: Tally) -> None:
    for name, table in sorted(tally.tables.items()):
        fault = table.fault()
        if fault is not None:
            raise IncompleteCheckpoint(f"checkpoint {draft.ref}: tensor {name}: {fault}")


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
