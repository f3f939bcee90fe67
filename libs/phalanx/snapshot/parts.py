"""The part object: what one rank wrote of a checkpoint, as canonical JSON at `a<attempt>/s<step>/parts/<rank>.json`.

It is written last, after all objects it names, so that its existence says that they are whole. Parsing is strict: an
unknown or missing field, a size that does not follow from shape and type, a key outside the checkpoint's own folder:
each is damage, never guessed around. The format is described for other programs in docs/formats/checkpoint.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from phalanx.core.box import Box
from phalanx.core.digest import canonical_json
from phalanx.lineage import CheckpointRef, ObjectRef, keys
from phalanx.snapshot.dtypes import DTYPES, Dtype
from phalanx.snapshot.errors import DamagedCheckpoint

FORMAT = "phalanx.part/1"
CHUNK_BYTES = 1 << 20
_FIELDS = ("format", "attempt", "step", "rank", "world_size", "chunk_bytes", "objects", "boxes", "records")
_OBJECT_FIELDS = ("key", "num_bytes", "digest", "data_start")
_RECORD_FIELDS = ("key", "num_bytes", "digest")
_BOX_FIELDS = ("tensor", "dtype", "global_shape", "offset", "shape", "object", "start", "num_bytes", "chunks")
_DIGEST = re.compile(r"xxh3:[0-9a-f]{32}")
_CHUNK = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A safetensors object: `num_bytes` in all, tensor data from `data_start` on, `digest` (xxh3, 128 bits) over all
    its bytes.
    """

    key: str
    num_bytes: int
    digest: str
    data_start: int


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, row-major in the bytes [start, start + num_bytes) of the data of object `key`.

    chunks: XXH3-64 (16 hex digits) of each `chunk_bytes` of the box's bytes, the last chunk shorter; none for an empty
    box.
    """

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    key: str
    start: int
    chunk_bytes: int
    chunks: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return self.box.num_elements * DTYPES[self.dtype].itemsize

    @property
    def kind(self) -> Dtype:
        """The element type."""
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Part:
    """All that rank `rank` of `world_size` wrote for step `step` of attempt `attempt`.

    records: the step records that the rank stored for the steps that this checkpoint is the first to cover.
    """

    attempt: int
    step: int
    rank: int
    world_size: int
    objects: tuple[StoredObject, ...]
    boxes: tuple[StoredBox, ...]
    records: tuple[ObjectRef, ...] = ()
    chunk_bytes: int = CHUNK_BYTES

    @property
    def ref(self) -> CheckpointRef:
        """The checkpoint that it is a part of."""
        return CheckpointRef(self.attempt, self.step)


def part_bytes(part: Part) -> bytes:
    """The stored form of `part`."""
    objects = [
        {"key": o.key, "num_bytes": o.num_bytes, "digest": o.digest, "data_start": o.data_start} for o in part.objects
    ]
    boxes = [
        {
            "tensor": b.tensor,
            "dtype": b.dtype,
            "global_shape": list(b.global_shape),
            "offset": list(b.box.offset),
            "shape": list(b.box.shape),
            "object": b.key,
            "start": b.start,
            "num_bytes": b.num_bytes,
            "chunks": list(b.chunks),
        }
        for b in part.boxes
    ]
    records = [{"key": r.key, "num_bytes": r.num_bytes, "digest": r.digest} for r in part.records]
    head = {"attempt": part.attempt, "step": part.step, "rank": part.rank, "world_size": part.world_size}
    lists = {"objects": objects, "boxes": boxes, "records": records}
    return canonical_json({"format": FORMAT, **head, "chunk_bytes": part.chunk_bytes, **lists})


def parse_part(key: str, data: bytes) -> Part:
    """The part stored under `key`; DamagedCheckpoint names what is wrong with it."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(key, f"is not JSON: {error}") from error
    read = _Reader(key)
    head = read.fields(value, "part", _FIELDS)
    if head["format"] != FORMAT:
        read.fail(f"format is {head['format']!r}, this version reads {FORMAT!r}")
    attempt, step, rank, world_size, chunk_bytes = (
        read.number(head[name], name) for name in ("attempt", "step", "rank", "world_size", "chunk_bytes")
    )
    ref = CheckpointRef(attempt, step)
    if rank >= world_size or chunk_bytes < 1 or key != keys.part(ref, rank):
        read.fail(f"it says attempt {attempt}, step {step}, rank {rank} of {world_size}, which is not its key")
    objects = tuple(read.object(item, keys.objects(ref)) for item in read.items(head["objects"], "objects"))
    by_key = {item.key: item for item in objects}
    if len(by_key) != len(objects):
        read.fail("an object is listed twice")
    boxes = tuple(read.box(item, by_key, chunk_bytes) for item in read.items(head["boxes"], "boxes"))
    records = tuple(read.record(item) for item in read.items(head["records"], "records"))
    return Part(attempt, step, rank, world_size, objects, boxes, records, chunk_bytes)


class _Reader:
    """Checks of one part's JSON, each failure naming the part's key."""

    def __init__(self, key: str) -> None:
        self._key = key

    def fail(self, why: str) -> NoReturn:
        raise DamagedCheckpoint(self._key, why)

    def fields(self, value: Any, what: str, names: tuple[str, ...]) -> Mapping[str, Any]:
        if not isinstance(value, dict) or len(value) != len(names) or not all(map(value.__contains__, names)):
            self.fail(f"{what} does not have exactly the fields {', '.join(names)}")
        return value

    def number(self, value: Any, what: str) -> int:
        if type(value) is not int or value < 0:
            self.fail(f"{what} is {value!r}, not a whole number")
        return value

    def text(self, value: Any, what: str) -> str:
        if not isinstance(value, str) or not value:
            self.fail(f"{what} is {value!r}, not a text")
        return value

    def items(self, value: Any, what: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(f"{what} is not a list")
        return value

    def sizes(self, value: Any, what: str) -> tuple[int, ...]:
        return tuple([self.number(item, what) for item in self.items(value, what)])

    def object(self, value: Any, prefix: str) -> StoredObject:
        row = self.fields(value, "an object", _OBJECT_FIELDS)
        key, digest = self.text(row["key"], "object key"), self.text(row["digest"], "digest")
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or not name or "/" in name:
            self.fail(f"object key {key!r} is not in {prefix}")
        if not _DIGEST.fullmatch(digest):
            self.fail(f"digest {digest!r} of {key} is not an xxh3 digest")
        found = StoredObject(
            key, self.number(row["num_bytes"], "num_bytes"), digest, self.number(row["data_start"], "data_start")
        )
        if found.data_start > found.num_bytes:
            self.fail(f"data of {key} starts behind its end")
        return found

    def record(self, value: Any) -> ObjectRef:
        row = self.fields(value, "a records object", _RECORD_FIELDS)
        key, digest = self.text(row["key"], "records key"), self.text(row["digest"], "digest")
        if not _DIGEST.fullmatch(digest) or keys.records_name(key) is None:
            self.fail(f"{key!r} with digest {digest!r} does not name a records object")
        return ObjectRef(key, self.number(row["num_bytes"], "num_bytes"), digest)

    def box(self, value: Any, objects: Mapping[str, StoredObject], chunk_bytes: int) -> StoredBox:
        # A commit of a large world parses a million of these: no generators, nothing computed twice.
        row = self.fields(value, "a box", _BOX_FIELDS)
        tensor, dtype = self.text(row["tensor"], "tensor"), self.text(row["dtype"], "dtype")
        key, start = self.text(row["object"], "object"), self.number(row["start"], "start")
        if dtype not in DTYPES or key not in objects:
            self.fail(f"tensor {tensor}: unknown dtype {dtype!r} or object {key!r}")
        global_shape = self.sizes(row["global_shape"], "global_shape")
        offset, shape = self.sizes(row["offset"], "offset"), self.sizes(row["shape"], "shape")
        if not len(global_shape) == len(offset) == len(shape):
            self.fail(f"tensor {tensor}: offset and shape do not fit the global shape")
        item, num_bytes = objects[key], math.prod(shape) * DTYPES[dtype].itemsize
        if row["num_bytes"] != num_bytes or start + num_bytes > item.num_bytes - item.data_start:
            self.fail(f"tensor {tensor}: its bytes do not follow from shape and dtype, or leave object {key}")
        chunks = tuple([self.text(each, "chunk") for each in self.items(row["chunks"], "chunks")])
        if len(chunks) != -(-num_bytes // chunk_bytes) or not all(map(_CHUNK.fullmatch, chunks)):
            self.fail(f"tensor {tensor}: chunk digests do not fit its bytes")
        return StoredBox(tensor, dtype, global_shape, Box(offset, shape), key, start, chunk_bytes, chunks)
