"""Reads a folder of torch.distributed.checkpoint: `.metadata`, a pickle, and `__<rank>_<n>.distcp` files with a saved
tensor for each box. Both are read as data (`isolated`, `zip_records`): no code in them runs anywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from phalanx.checkpoint.importing.hugging_face import parsed
from phalanx.checkpoint.importing.isolated import LIMITS, Limits, unpickled
from phalanx.checkpoint.importing.parameters import BEGIN_ANEW, is_counter
from phalanx.checkpoint.importing.source import Source, SourceBox, SourceTensor, checked, read_bytes, unusable
from phalanx.checkpoint.importing.zip_records import Item, SavedTensor, saved_pickle, saved_tensor
from phalanx.core.box import Box
from phalanx.core.digest import digest_of, sha256
from phalanx.core.errors import PhalanxError
from phalanx.objects import ObjectStore
from phalanx.objects.base import StoreDenied, check_key
from phalanx.snapshot.dtypes import DTYPES

METADATA: Final = ".metadata"
_CONFIG: Final = "config.json"
_READERS: Final = 16
_BATCH: Final = 4096
_Places = Mapping[tuple[str, tuple[int, ...]], Item]


def read_torch_dcp(store: ObjectStore, url: str, limits: Limits = LIMITS, *, counters: bool = True) -> Source:
    """The tensors of the folder `store`. counters: whether to read numbers of updates that are no tensors; False leaves
    them among the others. Raises PhalanxError for metadata that is not torch's, and for boxes that are not where it
    says.
    """
    data = read_bytes(store, METADATA)
    (found,) = unpickled(f"{url}/{METADATA}", "metadata", [data], limits)
    listed = {info.key: info.num_bytes for info in store.list()}
    places = _places(url, found["stored"], listed)
    tensors = {row["name"]: _tensor(url, row, places) for row in found["tensors"]}
    numbers = _numbers(store, url, found, listed, limits) if counters else {}
    config = read_bytes(store, _CONFIG) if _CONFIG in listed else None
    files = {item.key: listed[item.key] for item in places.values()}
    return Source(
        kind="torch-dcp",
        url=url,
        store=store,
        tensors=tensors,
        digest=digest_of({METADATA: sha256(data), "files": files, "config": sha256(config or b"")}),
        others=tuple(sorted(set(found["others"]) - numbers.keys())),
        config=None if config is None else parsed(f"{url}/{_CONFIG}", config),
        numbers=numbers,
    )


def _numbers(
    store: ObjectStore, url: str, found: Mapping[str, Any], listed: Mapping[str, int], limits: Limits
) -> dict[str, float]:
    """The counters of updates that are no tensors, read."""
    counters = {name for name in found["others"] if is_counter(name)}
    items = {row["name"]: _checked_item(url, row, listed) for row in found["stored"] if row["name"] in counters}
    with ThreadPoolExecutor(_READERS) as pool:
        pickles = list(pool.map(lambda item: saved_pickle(store, item), items.values()))
    where, names = f"{url}: data.pkl of a number", [f"{name} of {url}" for name in items]
    rows = unpickled(where, "numbers", pickles, limits, names=names, remedy=BEGIN_ANEW) if pickles else []
    return {name: float(row["value"]) for name, row in zip(items, rows, strict=True)}


def located(source: Source, names: Iterable[str], limits: Limits = LIMITS) -> dict[str, SourceTensor]:
    """The tensors `names`, with their boxes where the values begin: of each archive both ends are read, and its pickle
    must say that the values are as the metadata has them. Raises PhalanxError where they are not.
    """
    boxes = [(source.tensors[name], box) for name in names for box in source.tensors[name].boxes]
    found: dict[str, list[SourceBox]] = {}
    with ThreadPoolExecutor(_READERS) as pool:
        for first in range(0, len(boxes), _BATCH):
            batch = boxes[first : first + _BATCH]
            saved = list(pool.map(lambda each: saved_tensor(source.store, _item(each[1])), batch))
            pickles = [each.pickle for each in saved]
            names_of_batch = [f"tensor {tensor.name} of {source.url}" for tensor, _ in batch]
            where = f"{source.url}: data.pkl of a tensor"
            rows = unpickled(where, "tensors", pickles, limits, names=names_of_batch)
            for (tensor, box), archive, row in zip(batch, saved, rows, strict=True):
                start = _values_start(source.url, tensor, box, archive, row)
                found.setdefault(tensor.name, []).append(SourceBox(box.box, box.key, start))
    return {name: dataclasses.replace(source.tensors[name], boxes=tuple(each)) for name, each in found.items()}


def _item(box: SourceBox) -> Item:
    assert box.archive_bytes is not None, box
    return Item(box.key, box.start, box.archive_bytes)


def _places(url: str, rows: Iterable[Mapping[str, Any]], listed: Mapping[str, int]) -> _Places:
    """Where each box is stored, by name and offset."""
    places: dict[tuple[str, tuple[int, ...]], Item] = {}
    for row in rows:
        if row["offset"] is None:
            continue
        places[row["name"], tuple(row["offset"])] = _checked_item(url, row, listed)
    return places


def _checked_item(url: str, row: Mapping[str, Any], listed: Mapping[str, int]) -> Item:
    """Where the metadata says that something is stored; PhalanxError where it cannot be there."""
    item = Item(_safe(url, row["file"]), row["start"], row["num_bytes"])
    if item.key not in listed:
        raise unusable(url, item.key, "all files that .metadata names; this one is missing")
    if item.start < 0 or item.num_bytes < 0 or item.start + item.num_bytes > listed[item.key]:
        raise unusable(f"{url}/{item.key}", f"{listed[item.key]} bytes", "a file as long as .metadata says")
    if row["transformed"]:
        raise PhalanxError(
            f"{row['name']} of {url}",
            expected="values that are stored as they are",
            remedy="save it again without stream transforms (compression, encryption)",
        )
    return item


def _safe(url: str, file: str) -> str:
    try:
        return check_key(file)
    except StoreDenied as error:
        raise unusable(f"{url}/{METADATA}", file, "names of files inside the folder") from error


def _tensor(url: str, row: Mapping[str, Any], places: _Places) -> SourceTensor:
    name, shape, boxes = row["name"], tuple(row["shape"]), []
    for offset, size in row["chunks"]:
        item = places.get((name, tuple(offset)))
        if item is None or len(offset) != len(size) or min((*offset, *size), default=0) < 0:
            raise unusable(f"tensor {name} of {url}", f"a box at {offset} of {size}", "a box that is stored")
        boxes.append(SourceBox(Box(tuple(offset), tuple(size)), item.key, item.start, item.num_bytes))
    return checked(SourceTensor(name, row["dtype"], shape, tuple(boxes)), url)


def _values_start(url: str, tensor: SourceTensor, box: SourceBox, saved: SavedTensor, row: Mapping[str, Any]) -> int:
    """The byte of the file at which the box's first element is."""
    itemsize, first = DTYPES[tensor.dtype].itemsize, row["first"]
    shape, strides = tuple(row["shape"]), row["strides"]
    is_it = row["dtype"] == tensor.dtype and row["key"] == saved.storage and shape == box.box.shape
    fits = first >= 0 and (first + math.prod(shape)) * itemsize <= saved.data_bytes
    if not is_it or not fits:
        raise unusable(f"tensor {tensor.name} of {url}", str(dict(row)), f"{tensor.dtype} {list(box.box.shape)}")
    if not _is_row_major(shape, strides):
        raise PhalanxError(
            f"tensor {tensor.name} of {url}",
            value=f"stored with the strides {strides}",
            expected=f"row-major values of the shape {list(shape)}",
            remedy="save it again after calling contiguous()",
        )
    return saved.data_start + int(first) * itemsize


def _is_row_major(shape: tuple[int, ...], strides: list[int]) -> bool:
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=False):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return len(shape) == len(strides)
