"""The ids of a shard's documents: `<shard>.ids.json`, canonical JSON with the list `ids` among what else a preparation
notes.

Canonical JSON has one byte form for each id, so looking for these bytes tells, at memory speed and without parsing,
that an id is not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import Split, ids_key

READERS = 8
_AHEAD = 4 * READERS


def decode_ids(data: bytes, num_documents: int) -> list[str]:
    """The ids in the bytes of a shard's ids.json, in order; raises ValueError where they are not `num_documents`."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        record = None
    ids = record.get("ids") if isinstance(record, dict) else None
    if not isinstance(ids, list) or len(ids) != num_documents or set(map(type, ids)) - {str}:
        raise ValueError(f"it does not hold {num_documents} ids")
    return ids


def read_ids(store: ObjectStore, split: Split, shard: int) -> list[str]:
    """The ids of a shard's documents; raises OutsideError, naming the object, where they are damaged or missing."""
    return _decoded(store, split, shard, _read(store, split, shard))


def find_id(
    store: ObjectStore, split: Split, document_id: str, told: Callable[[int], None] = lambda shards: None
) -> Iterator[tuple[int, int]]:
    """(shard, number in the shard) of every document with this id, in the split's order. Reads the ids of all shards,
    several at a time, and parses those that hold the id. told: hears how many shards are done. Raises as `read_ids`.
    """
    needle = json.dumps(document_id, ensure_ascii=False).encode(errors="surrogatepass")

    def look(shard: int) -> list[int]:
        data = _read(store, split, shard)
        if needle not in data:
            return []
        return [number for number, each in enumerate(_decoded(store, split, shard, data)) if each == document_id]

    with ThreadPoolExecutor(READERS, thread_name_prefix="ids") as pool:
        for first in range(0, split.num_shards, _AHEAD):
            shards = range(first, min(first + _AHEAD, split.num_shards))
            for shard, numbers in zip(shards, pool.map(look, shards), strict=True):
                told(shard + 1)
                yield from ((shard, number) for number in numbers)


def _read(store: ObjectStore, split: Split, shard: int) -> bytes:
    entry = split.shard(shard)
    key = ids_key(entry.name)
    try:
        data = store.read(key)
    except ObjectMissing:
        raise OutsideError(f"{store.url}/{key} is damaged: it is missing") from None
    if xxh3(data) != entry.ids_digest:
        raise OutsideError(f"{store.url}/{key} is damaged: its digest is not {entry.ids_digest}")
    return data


def _decoded(store: ObjectStore, split: Split, shard: int, data: bytes) -> list[str]:
    entry = split.shard(shard)
    try:
        return decode_ids(data, entry.num_documents)
    except ValueError as error:
        raise OutsideError(f"{store.url}/{ids_key(entry.name)} is damaged: {error}") from None
