"""Reads the headers of a folder of safetensors files: one file, several with an index, or the shards that torch's
HuggingFaceStorageWriter leaves. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from phalanx.checkpoint.importing.source import Source, SourceBox, SourceTensor, checked, read_bytes, unusable
from phalanx.core.box import Box
from phalanx.core.digest import digest_of, sha256
from phalanx.core.errors import PhalanxError
from phalanx.models.hugging_face import INDEX_NAME
from phalanx.objects import ObjectStore
from phalanx.snapshot.dtypes import DTYPES

SUFFIX: Final = ".safetensors"
MAX_HEADER_BYTES: Final = 100_000_000  # as the safetensors library has it
_SHARDING: Final = "DCP_SHARDING_INFO"
_BY_CODE: Final = {dtype.code: name for name, dtype in DTYPES.items()}


def read_hugging_face(store: ObjectStore, url: str) -> Source:
    """The tensors of the safetensors files in the folder `store`. Raises PhalanxError for a file that is missing or
    damaged.
    """
    listed = {info.key: info.num_bytes for info in store.list() if "/" not in info.key}
    small = {name: read_bytes(store, name) for name in ("config.json", INDEX_NAME) if name in listed}
    files = _files(url, listed, small.get(INDEX_NAME))
    headers = {file: _header(store, file, listed[file]) for file in files}
    tensors: dict[str, list[SourceTensor]] = {}
    for file, (table, data_start) in headers.items():
        for tensor in _tensors(f"{url}/{file}", file, table, data_start, listed[file]):
            tensors.setdefault(tensor.name, []).append(tensor)
    _check_index(url, tensors, small.get(INDEX_NAME))
    facts = {file: [listed[file], digest_of(table)] for file, (table, _) in headers.items()}
    return Source(
        kind="hugging-face",
        url=url,
        store=store,
        tensors={name: _joined(url, each) for name, each in tensors.items()},
        digest=digest_of({"files": facts, **{name: sha256(data) for name, data in small.items()}}),
        config=parsed(f"{url}/config.json", small["config.json"]) if "config.json" in small else None,
    )


def parsed(where: str, data: bytes) -> Mapping[str, Any]:
    """The JSON object in a file of the source; PhalanxError where it is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise unusable(where, str(error), "JSON") from error
    if not isinstance(value, dict):
        raise unusable(where, type(value).__name__, "a JSON object")
    return value


def _files(url: str, listed: Mapping[str, int], index: bytes | None) -> list[str]:
    if index is None:
        files = sorted(name for name in listed if name.endswith(SUFFIX))
    else:
        files = sorted(set(_weight_map(url, index).values()))
    missing = [name for name in files if name not in listed]
    if missing:
        raise unusable(url, ", ".join(missing), f"all files that {INDEX_NAME} names; missing are these")
    if not files:
        raise PhalanxError(
            "SOURCE",
            value=url,
            expected="a folder with safetensors files or with the .metadata of torch.distributed.checkpoint",
            remedy="name the folder itself; a .bin or .pt file is a pickle: save it as safetensors first",
        )
    return files


def _weight_map(url: str, index: bytes) -> Mapping[str, str]:
    found = parsed(f"{url}/{INDEX_NAME}", index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise unusable(f"{url}/{INDEX_NAME}", None, "a weight_map of names of files")
    return found


def _check_index(url: str, tensors: Mapping[str, list[SourceTensor]], index: bytes | None) -> None:
    """Every tensor is where the index says."""
    for name, file in ({} if index is None else _weight_map(url, index)).items():
        if name not in tensors or all(box.key != file for each in tensors[name] for box in each.boxes):
            raise unusable(f"{url}/{file}", None, f"the tensor {name}, as {INDEX_NAME} says")


def _header(store: ObjectStore, file: str, num_bytes: int) -> tuple[Mapping[str, Any], int]:
    """The table of a file, and the byte at which its data starts."""
    where = f"{store.url}/{file}"
    if num_bytes < 8:
        raise unusable(where, f"{num_bytes} bytes", "a safetensors file")
    (length,) = struct.unpack("<Q", read_bytes(store, file, 0, 8))
    if length > min(MAX_HEADER_BYTES, num_bytes - 8):
        raise unusable(where, f"a header of {length} bytes", "a safetensors file")
    return parsed(where, read_bytes(store, file, 8, length)), 8 + length


def _tensors(
    where: str, file: str, table: Mapping[str, Any], data_start: int, num_bytes: int
) -> Sequence[SourceTensor]:
    """The tensors of a file. Raises PhalanxError where their bytes don't tile its data: the format allows no gaps."""
    offsets = _saved_offsets(where, table)
    tensors: list[SourceTensor] = []
    spans: list[tuple[int, int, str]] = []
    for name, row in table.items():
        if name == "__metadata__":
            continue
        named = f"tensor {name} of {where}"
        try:
            code, shape, (start, stop) = row["dtype"], _numbers(row["shape"]), _numbers(row["data_offsets"])
            offset = _numbers(offsets.get(name, [0] * len(shape)))
        except (KeyError, TypeError, ValueError) as error:
            raise unusable(named, str(row), "dtype, shape and data_offsets") from error
        if not isinstance(code, str) or code not in _BY_CODE:
            raise PhalanxError(
                named,
                value=code,
                expected=f"one of the types {', '.join(_BY_CODE)}",
                remedy="save it as BF16 or F32 first: quantised weights can't be trained on",
            )
        dtype = _BY_CODE[code]
        fits = start >= 0 and stop <= num_bytes - data_start and min((*shape, *offset), default=0) >= 0
        if not fits or len(offset) != len(shape) or stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
            raise unusable(named, str(row), "bytes that fit its shape, inside the file")
        box = SourceBox(Box(offset, shape), file, data_start + start)
        tensors.append(SourceTensor(name, dtype, shape, (box,)))
        spans.append((start, stop, name))
    _require_tiled(where, spans, num_bytes - data_start)
    return tensors


def _numbers(value: object) -> tuple[int, ...]:
    """A list of whole numbers; ValueError for anything else."""
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        raise ValueError(value)
    return tuple(value)


def _require_tiled(where: str, spans: Iterable[tuple[int, int, str]], data_bytes: int) -> None:
    """Each span [start, stop) of a tensor begins where the one before it ends, and the last ends with the data."""
    end = 0
    for start, stop, name in (*sorted(spans), (data_bytes, data_bytes, "")):
        if start != end:
            at = f"{name} begins at byte {start}" if name else f"it has {start} bytes"
            found = f"{at}, the tensors before end at byte {end}"
            raise unusable(where, found, "tensors that lie one behind the other without gaps")
        end = stop


def _saved_offsets(where: str, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the boxes of a shard lie in their tensors, as torch's writer notes it; nothing in other files."""
    metadata = table.get("__metadata__")
    text = metadata.get(_SHARDING) if isinstance(metadata, dict) else None
    if text is None:
        return {}
    rows = parsed(where, str(text).encode())
    return {name: row.get("saved_offsets") for name, row in rows.items() if isinstance(row, dict)}


def _joined(url: str, found: list[SourceTensor]) -> SourceTensor:
    """The tensor of which these are boxes."""
    first = found[0]
    boxes = tuple(box for each in found for box in each.boxes)
    if any(each.dtype != first.dtype or len(each.shape) != len(first.shape) for each in found):
        raise unusable(f"tensor {first.name} of {url}", None, "one type in all files")
    shape = tuple(max(b.box.offset[d] + b.box.shape[d] for b in boxes) for d in range(len(first.shape)))
    return checked(SourceTensor(first.name, first.dtype, shape, boxes), url)
