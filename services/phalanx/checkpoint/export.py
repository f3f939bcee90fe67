"""A checkpoint as a Hugging Face model folder: config.json, safetensors (one file or several with an index), tokenizer
files.

Tensors pass one by one, so memory is about that of the largest. The folder is written under a temporary name beside the
target and renamed when it is whole; an existing target is refused. Format of the folder:
https://huggingface.co/docs/safetensors and transformers' `save_pretrained`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from phalanx.core.errors import PhalanxError
from phalanx.lineage import Manifest
from phalanx.objects import ObjectStore
from phalanx.snapshot.dtypes import DTYPES, bfloat16_to_float32, float32_to_bfloat16
from phalanx.snapshot.fetch import read_tensor
from phalanx.snapshot.grouping import safetensors_header
from phalanx.snapshot.index import Index, StoredTensor, read_index

ExportDtype = Literal["float32", "bfloat16"]
FILE_BYTES = 5 << 30
_PREFIX = "model."
_FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Target:
    """What the model is called at Hugging Face.

    config: content of config.json. name_of: from a canonical parameter name to theirs, None for a tensor that they do
    not store. files: further files of the folder (tokenizer.json, ...) by name.
    """

    config: Mapping[str, Any]
    name_of: Callable[[str], str | None]
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The folder written, its number of tensors and their bytes."""

    folder: str
    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    stored: StoredTensor
    dtype: str
    num_bytes: int


def export(
    store: ObjectStore,
    manifest: Manifest,
    out: Path,
    target: Target,
    *,
    dtype: ExportDtype = "float32",
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int], None] = lambda _: None,
) -> ExportReport:
    """Writes the weights of a checkpoint to the new folder `out`. `progress` hears the bytes of each tensor written.

    dtype: of all floating-point tensors; others keep theirs. file_bytes: a file is closed before it would grow larger.
    Raises PhalanxError where `out` exists, DamagedObject where the checkpoint is damaged (nothing is left behind).
    """
    if out.exists():
        raise PhalanxError(
            str(out), expected="a folder that does not exist yet", remedy="choose another --out or remove it"
        )
    index = read_index(store, manifest)
    groups = _grouped(_entries(index, target, dtype), file_bytes)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}.{uuid.uuid4().hex}.part"
    temporary.mkdir()
    try:
        names = _write_weights(store, index, temporary, groups, progress)
        for name, data in {"config.json": _json({**target.config, "dtype": dtype}), **target.files}.items():
            _write_file(temporary / name, data)
        _sync_folder(temporary)
        temporary.rename(out)
        _sync_folder(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    entries = [entry for group in groups for entry in group]
    files = (*names, "config.json", *target.files)
    return ExportReport(str(out), len(entries), sum(entry.num_bytes for entry in entries), files)


def _entries(index: Index, target: Target, dtype: ExportDtype) -> list[_Entry]:
    """What is written, by the names at Hugging Face; optimizer state and tensors without a name there are left out."""
    entries = []
    for name, stored in index.tensors.items():
        theirs = target.name_of(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
        if theirs is not None:
            written = dtype if stored.dtype in _FLOATS else stored.dtype
            num_bytes = math.prod(stored.global_shape) * DTYPES[written].itemsize
            entries.append(_Entry(theirs, stored, written, num_bytes))
    return entries


def _grouped(entries: list[_Entry], file_bytes: int) -> list[list[_Entry]]:
    groups: list[list[_Entry]] = [[]]
    filled_bytes = 0
    for entry in entries:
        if groups[-1] and filled_bytes + entry.num_bytes > file_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(entry)
        filled_bytes += entry.num_bytes
    return groups


def _write_weights(
    store: ObjectStore, index: Index, folder: Path, groups: list[list[_Entry]], progress: Callable[[int], None]
) -> list[str]:
    """Writes the safetensors files (and their index where they are several); returns their names."""
    names = [_file_name(number, len(groups)) for number in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        with (folder / name).open("xb") as file:
            file.write(_header(group))
            for entry in group:
                _write_tensor(file, read_tensor(store, index, entry.stored), entry)
                progress(entry.num_bytes)
            file.flush()
            os.fsync(file.fileno())
    if len(groups) == 1:
        return names
    weight_map = {entry.name: name for name, group in zip(names, groups, strict=True) for entry in group}
    total = sum(entry.num_bytes for group in groups for entry in group)
    listing = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_file(folder / "model.safetensors.index.json", _json(listing))
    return [*names, "model.safetensors.index.json"]


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _header(group: list[_Entry]) -> bytes:
    rows = []
    position = 0
    for entry in group:
        rows.append((entry.name, entry.dtype, entry.stored.global_shape, position, position + entry.num_bytes))
        position += entry.num_bytes
    return safetensors_header(rows, {"format": "pt"})


def _write_tensor(file: BinaryIO, raw: np.ndarray, entry: _Entry) -> None:
    values = converted(raw, entry.stored.dtype, entry.dtype)
    assert values.nbytes == entry.num_bytes, entry
    file.write(values.reshape(-1).view(np.uint8).data)


def converted(raw: np.ndarray, stored: str, wanted: str) -> np.ndarray:
    """`raw` (bytes of type `stored`) in type `wanted`: widening is exact, narrowing rounds to nearest even."""
    if stored == wanted:
        return raw
    wide = bfloat16_to_float32(raw) if stored == "bfloat16" else raw.astype(np.float32)
    return float32_to_bfloat16(wide) if wanted == "bfloat16" else wide


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _write_file(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
