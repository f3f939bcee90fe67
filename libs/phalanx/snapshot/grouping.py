"""How a rank's boxes are laid out in safetensors objects: which boxes share an object, at which byte, under which
header. Pure.

The host buffer of a save holds the objects as they are stored, header and data, one after the other, so that each is
created from one contiguous run of memory. Objects stay below `OBJECT_BYTES`, except that a box is never cut:
a bigger one is an object of its own. Within an object wide element types come first, so that every tensor is aligned
for those who map the file. Format: safetensors, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.box import Box, whole
from phalanx.snapshot.dtypes import DTYPES

OBJECT_BYTES = 256 << 20
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class OwnedBox:
    """A box that this rank writes. `index` tells the caller which of its tensors the values come from."""

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    index: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return self.box.num_elements * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """One object to be: its safetensors header, and its boxes with the byte in the object's data at which each starts.

    buffer_start: where the object, header first, begins in the host buffer.
    """

    header: bytes
    boxes: tuple[tuple[OwnedBox, int], ...]
    data_bytes: int
    buffer_start: int

    @property
    def data_start(self) -> int:
        """Where the object's data begins in the host buffer; aligned as the header's padding leaves it, to 8 bytes."""
        return self.buffer_start + len(self.header)

    @property
    def num_bytes(self) -> int:
        """Bytes of the object, header included."""
        return len(self.header) + self.data_bytes


def plan_objects(owned: Sequence[OwnedBox], object_bytes: int = OBJECT_BYTES) -> tuple[PlannedObject, ...]:
    """Objects for `owned`, in its order as far as sizes allow. Names of (tensor, box) must be unique."""
    groups: list[list[OwnedBox]] = []
    filling: list[OwnedBox] = []
    filled_bytes = 0
    for item in owned:
        if item.num_bytes >= object_bytes:
            groups.append([item])
            continue
        if filled_bytes + item.num_bytes > object_bytes:
            groups.append(filling)
            filling, filled_bytes = [], 0
        filling.append(item)
        filled_bytes += item.num_bytes
    groups += [filling] if filling else []
    planned: list[PlannedObject] = []
    position = 0
    for group in groups:
        planned.append(_planned(group, position))
        position += -(-planned[-1].num_bytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(planned)


def buffer_bytes(objects: Sequence[PlannedObject]) -> int:
    """Size of the host buffer that holds all objects."""
    return max((item.buffer_start + item.num_bytes for item in objects), default=0)


def entry_name(tensor: str, global_shape: tuple[int, ...], box: Box) -> str:
    """Name inside a safetensors object: the tensor's, with the slices of the box behind it where it is not the whole
    tensor.
    """
    if box == whole(global_shape):
        return tensor
    return f"{tensor}[{','.join(f'{a}:{a + n}' for a, n in zip(box.offset, box.shape, strict=True))}]"


def safetensors_header(
    entries: Sequence[tuple[str, str, tuple[int, ...], int, int]], metadata: dict[str, str]
) -> bytes:
    """Header of a safetensors file: length, JSON, padding to 8 bytes. Entries: (name, dtype, shape, start, stop) in
    order of bytes.
    """
    table: dict[str, object] = {"__metadata__": metadata}
    for name, dtype, shape, start, stop in entries:
        assert name not in table, f"{name} twice in one object"
        table[name] = {"dtype": DTYPES[dtype].code, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _planned(group: Sequence[OwnedBox], buffer_start: int) -> PlannedObject:
    position = 0
    boxes: list[tuple[OwnedBox, int]] = []
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
    for item in sorted(group, key=lambda b: -DTYPES[b.dtype].itemsize):
        stop = position + item.num_bytes
        boxes.append((item, position))
        entries.append(
            (entry_name(item.tensor, item.global_shape, item.box), item.dtype, item.box.shape, position, stop)
        )
        position = stop
    header = safetensors_header(entries, {"format": "phalanx.snapshot/1"})
    return PlannedObject(header, tuple(boxes), position, buffer_start)
