"""Which files an export has, and every byte of their headers: pure, from a checkpoint's index."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.core.digest import sha256
from phalanx.snapshot.dtypes import DTYPES
from phalanx.snapshot.grouping import safetensors_header
from phalanx.snapshot.index import Index, StoredTensor

ExportDtype = Literal["float32", "bfloat16"]
_PREFIX = "model."
_FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in an export: its name and type there."""

    name: str
    stored: StoredTensor
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of its values in the export."""
        return math.prod(self.stored.global_shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file: its name in the folder, its header, and its tensors in the order of their bytes."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.tensor_bytes

    @property
    def tensor_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(entry.num_bytes for entry in self.entries)


def planned_files(
    index: Index, name_of: Callable[[str], str | None], dtype: ExportDtype, file_bytes: int
) -> tuple[WeightFile, ...]:
    """The files of all parameters, each closed before it would grow above `file_bytes` of tensors."""
    groups = _grouped(_entries(index, name_of, dtype), file_bytes)
    names = [_file_name(number, len(groups)) for number in range(len(groups))]
    return tuple(WeightFile(name, _header(group), tuple(group)) for name, group in zip(names, groups, strict=True))


def listing(files: Sequence[WeightFile]) -> bytes | None:
    """Content of the index that names the file of each tensor; None where one file holds all."""
    if len(files) == 1:
        return None
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    total = sum(file.tensor_bytes for file in files)
    return json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})


def plan_digest(files: Sequence[WeightFile]) -> str:
    """Tells plans apart: names, headers and with them sizes of all files."""
    return sha256(b"".join(f"{file.name}\n".encode() + file.header for file in files))


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """A small file of the folder."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def exported_name(name: str, name_of: Callable[[str], str | None]) -> str | None:
    """What a tensor of the checkpoint is called in an export; None for one that is left out."""
    return name_of(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None


def _entries(index: Index, name_of: Callable[[str], str | None], dtype: ExportDtype) -> list[Entry]:
    """What is written, by the names at Hugging Face; optimizer state and tensors without a name there are left out."""
    entries = []
    for name, stored in index.tensors.items():
        theirs = exported_name(name, name_of)
        if theirs is not None:
            entries.append(Entry(theirs, stored, dtype if stored.dtype in _FLOATS else stored.dtype))
    return entries


def _grouped(entries: Sequence[Entry], file_bytes: int) -> list[list[Entry]]:
    groups: list[list[Entry]] = [[]]
    filled_bytes = 0
    for entry in entries:
        if groups[-1] and filled_bytes + entry.num_bytes > file_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(entry)
        filled_bytes += entry.num_bytes
    return groups


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _header(group: Sequence[Entry]) -> bytes:
    rows = []
    position = 0
    for entry in group:
        rows.append((entry.name, entry.dtype, entry.stored.global_shape, position, position + entry.num_bytes))
        position += entry.num_bytes
    return safetensors_header(rows, {"format": "pt"})
