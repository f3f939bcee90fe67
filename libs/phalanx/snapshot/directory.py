"""By which parts a tensor's boxes are found: written at a commit of many parts, so that a rank reads those it needs.

A catalogue names every tensor with its type, its shape and its shard; a shard holds, for tensors that are neighbours by
name, each stored box as columns: the number of its part, its offset and its shape. What the boxes' bytes are is said
by the parts alone. Format: docs/formats/checkpoint.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from phalanx.core.digest import canonical_json
from phalanx.lineage import ObjectRef
from phalanx.snapshot.dtypes import DTYPES
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.tally import BoxTable

CATALOGUE_FORMAT: Final = "phalanx.directory/1"
SHARD_FORMAT: Final = "phalanx.directory-shard/1"
SHARD_BOXES: Final = 16_384  # about half a megabyte


@dataclass(frozen=True, slots=True)
class Entry:
    """What the catalogue says of a tensor. shard: number of the shard that has its boxes."""

    dtype: str
    global_shape: tuple[int, ...]
    shard: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All tensors of a checkpoint by name, and the shards."""

    tensors: Mapping[str, Entry]
    shards: tuple[ObjectRef, ...]


def put_directory(tables: Mapping[str, BoxTable], put: Callable[[bytes], ObjectRef]) -> ObjectRef:
    """Stores the directory of a checkpoint by `put` (bytes -> the object that now holds them), the catalogue last."""
    shards: list[ObjectRef] = []
    rows: list[dict[str, Any]] = []
    filling: list[dict[str, Any]] = []
    num_boxes = 0
    for name, table in sorted(tables.items()):
        if filling and num_boxes + table.num_boxes > SHARD_BOXES:
            shards.append(put(_shard(filling)))
            filling, num_boxes = [], 0
        rows.append({"name": name, "dtype": table.dtype, "shape": list(table.global_shape), "shard": len(shards)})
        offsets, shapes = table.columns()
        columns = {"parts": list(table.parts), "offsets": offsets.ravel().tolist(), "shapes": shapes.ravel().tolist()}
        filling.append({"name": name, **columns})
        num_boxes += table.num_boxes
    if filling:
        shards.append(put(_shard(filling)))
    names = [{"key": ref.key, "num_bytes": ref.num_bytes, "digest": ref.digest} for ref in shards]
    return put(canonical_json({"format": CATALOGUE_FORMAT, "tensors": rows, "shards": names}))


def parse_catalogue(key: str, data: bytes) -> Catalogue:
    """The catalogue stored at `key`, whose digest was checked; DamagedCheckpoint where it is none."""
    try:
        content = json.loads(data)
        shards = tuple(ObjectRef(row["key"], row["num_bytes"], row["digest"]) for row in content["shards"])
        tensors = {row["name"]: Entry(row["dtype"], tuple(row["shape"]), row["shard"]) for row in content["tensors"]}
        is_right = content["format"] == CATALOGUE_FORMAT and all(
            entry.dtype in DTYPES and 0 <= entry.shard < len(shards) for entry in tensors.values()
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(key, f"is no directory: {error!r}") from error
    if not is_right:
        raise DamagedCheckpoint(key, f"is not what a directory of the format {CATALOGUE_FORMAT!r} is")
    return Catalogue(tensors, shards)


def parse_shard(
    key: str, data: bytes, catalogue: Catalogue, names: Collection[str]
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """Of each of `names` in the shard at `key`: the name, and of its boxes the part, int64 [n], offset and shape, int64
    [n, dims].
    """
    try:
        content = json.loads(data)
        if content["format"] != SHARD_FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        for row in content["tensors"]:
            if row["name"] in names:
                parts = np.array(row["parts"], dtype=np.int64)
                size = (len(parts), len(catalogue.tensors[row["name"]].global_shape))
                offsets, shapes = (np.array(row[column], dtype=np.int64).reshape(size) for column in _COLUMNS)
                yield row["name"], parts, offsets, shapes
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise DamagedCheckpoint(key, f"is no shard of a directory: {error!r}") from error


_COLUMNS: Final = ("offsets", "shapes")


def _shard(tensors: list[dict[str, Any]]) -> bytes:
    return canonical_json({"format": SHARD_FORMAT, "tensors": tensors})
