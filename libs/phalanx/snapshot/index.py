"""What a committed checkpoint holds, read from its parts: every tensor with its type, shape and stored boxes.

Of a checkpoint with a directory a rank reads the parts that its boxes need; of a small one all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from phalanx.core.box import Box
from phalanx.lineage import DamagedObject, Lineage, Manifest, ObjectRef
from phalanx.lineage.lists import REFS_A_LIST, decode_refs
from phalanx.objects import ObjectStore
from phalanx.snapshot.directory import Catalogue, parse_catalogue, parse_shard
from phalanx.snapshot.dtypes import DTYPES, Dtype
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.parts import Part, StoredBox, StoredObject, parse_part

NUM_READERS = 4
NUM_PART_READERS = 16
PARTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its boxes tile `global_shape` exactly once."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]

    @property
    def kind(self) -> Dtype:
        """The element type."""
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Index:
    """All tensors of a checkpoint by name, and objects by key: all, or those that `read_needed` was asked for, with
    the boxes in them.

    num_bytes: what was read for it.
    """

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]
    num_bytes: int = 0

    def boxes_of(self, key: str) -> tuple[StoredBox, ...]:
        """The boxes that object `key` holds, in order of their bytes."""
        return tuple(sorted((b for t in self.tensors.values() for b in t.boxes if b.key == key), key=lambda b: b.start))


def read_index(store: ObjectStore, manifest: Manifest) -> Index:
    """The index of a committed checkpoint; DamagedCheckpoint names a part that is gone or not the manifest's."""
    try:
        refs = tuple(Lineage(store).part_refs(manifest))
    except DamagedObject as error:
        raise DamagedCheckpoint(error.key, error.reason) from error
    return build_index(read_parts(store, refs), sum(ref.num_bytes for ref in refs))


def read_needed(store: ObjectStore, manifest: Manifest, needed: Mapping[str, Sequence[Box]]) -> Index:
    """The index as far as it takes to read the boxes in `needed`: every tensor is named, but a tensor's `boxes` may
    lack those that share no element with them. DamagedCheckpoint as by `read_index`.
    """
    if manifest.directory is None:
        return read_index(store, manifest)
    reader = _Reader(store)
    catalogue = parse_catalogue(manifest.directory.key, reader.read(manifest.directory))
    numbers = sorted(_needed_parts(reader, catalogue, needed))
    refs = _refs_of(reader, manifest, numbers)
    found = build_index(read_parts(store, refs))
    tensors = {
        name: StoredTensor(name, entry.dtype, entry.global_shape, _boxes_in(found, name, entry.global_shape))
        for name, entry in catalogue.tensors.items()
    }
    return Index(tensors, found.objects, reader.num_bytes + sum(ref.num_bytes for ref in refs))


def read_parts(store: ObjectStore, refs: Sequence[ObjectRef]) -> Iterator[Part]:
    """The parts in order, verified, a few at a time."""
    with ThreadPoolExecutor(min(NUM_PART_READERS, max(1, len(refs)))) as pool:
        for first in range(0, len(refs), PARTS_AT_ONCE):
            yield from pool.map(lambda ref: read_part(store, ref), refs[first : first + PARTS_AT_ONCE])


def read_part(store: ObjectStore, ref: ObjectRef) -> Part:
    """The part object `ref`, verified against its size and digest; DamagedCheckpoint otherwise."""
    return parse_part(ref.key, _Reader(store).read(ref))


class _Reader:
    """Reads what a manifest names, verified; counts its bytes."""

    def __init__(self, store: ObjectStore) -> None:
        self._lineage = Lineage(store)
        self.num_bytes = 0

    def read(self, ref: ObjectRef) -> bytes:
        self.num_bytes += ref.num_bytes
        try:
            return self._lineage.read_verified(ref)
        except DamagedObject as error:
            raise DamagedCheckpoint(error.key, error.reason) from error


def _needed_parts(reader: _Reader, catalogue: Catalogue, needed: Mapping[str, Sequence[Box]]) -> set[int]:
    """Numbers of the parts that hold an element of a needed box."""
    by_shard: dict[int, set[str]] = {}
    for name in needed:
        if name in catalogue.tensors:
            by_shard.setdefault(catalogue.tensors[name].shard, set()).add(name)
    numbers: set[int] = set()
    for shard, names in sorted(by_shard.items()):
        ref = catalogue.shards[shard]
        for name, parts, offsets, shapes in parse_shard(ref.key, reader.read(ref), catalogue, names):
            num_dims = offsets.shape[1]
            for box in needed[name]:
                if len(box.shape) == num_dims:  # where not, the restore says that the shapes differ
                    first, size = np.array(box.offset, dtype=np.int64), np.array(box.shape, dtype=np.int64)
                    shared = np.minimum(offsets + shapes, first + size) > np.maximum(offsets, first)
                    numbers.update(parts[shared.all(axis=1)].tolist())
    return numbers


def _refs_of(reader: _Reader, manifest: Manifest, numbers: Sequence[int]) -> tuple[ObjectRef, ...]:
    """The parts of these numbers, read from the lists that have them."""
    lists: dict[int, tuple[ObjectRef, ...]] = {}
    found: list[ObjectRef] = []
    for number in numbers:
        at, row = divmod(number, REFS_A_LIST)
        if at not in lists:
            ref = manifest.part_lists[at]
            lists[at] = decode_refs(ref.key, reader.read(ref))
        found.append(lists[at][row])
    return tuple(found)


def _boxes_in(index: Index, name: str, global_shape: tuple[int, ...]) -> tuple[StoredBox, ...]:
    boxes = index.tensors[name].boxes if name in index.tensors else ()
    for box in boxes:
        if box.global_shape != global_shape:
            raise DamagedCheckpoint(box.key, "has another shape than the directory says", tensor=name)
    return boxes


def build_index(parts: Iterable[Part], num_bytes: int = 0) -> Index:
    """Joins parts; DamagedCheckpoint where they disagree on a tensor's type or shape."""
    boxes: dict[str, list[StoredBox]] = {}
    objects: dict[str, StoredObject] = {}
    for part in parts:
        objects.update((item.key, item) for item in part.objects)
        for box in part.boxes:
            known = boxes.setdefault(box.tensor, [])
            if known and (known[0].dtype, known[0].global_shape) != (box.dtype, box.global_shape):
                raise DamagedCheckpoint(
                    box.key, f"has {box.dtype} {list(box.global_shape)}, unlike {known[0].key}", tensor=box.tensor
                )
            known.append(box)
    tensors = {name: StoredTensor(name, b[0].dtype, b[0].global_shape, tuple(b)) for name, b in sorted(boxes.items())}
    return Index(tensors, objects, num_bytes)
