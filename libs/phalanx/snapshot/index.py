"""What a committed checkpoint holds, read from its parts: every tensor with its type, shape and stored boxes. Whoever
needs some of it reads the parts that have it: `lookup`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from phalanx.lineage import DamagedObject, Lineage, Manifest, ObjectRef
from phalanx.objects import ObjectStore
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
    """All tensors of a checkpoint by name, and objects by key: all, or those that a `lookup` was asked for, with
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


def read_parts(store: ObjectStore, refs: Sequence[ObjectRef]) -> Iterator[Part]:
    """The parts in order, verified, a few at a time."""
    with ThreadPoolExecutor(min(NUM_PART_READERS, max(1, len(refs)))) as pool:
        for first in range(0, len(refs), PARTS_AT_ONCE):
            yield from pool.map(lambda ref: read_part(store, ref), refs[first : first + PARTS_AT_ONCE])


def read_part(store: ObjectStore, ref: ObjectRef) -> Part:
    """The part object `ref`, verified against its size and digest; DamagedCheckpoint otherwise."""
    return parse_part(ref.key, VerifiedReader(store).read(ref))


class VerifiedReader:
    """Reads what a manifest names, verified; counts its bytes."""

    def __init__(self, store: ObjectStore) -> None:
        self._lineage = Lineage(store)
        self.num_bytes = 0

    def read(self, ref: ObjectRef) -> bytes:
        """Its bytes; DamagedCheckpoint where they are not what was named."""
        self.num_bytes += ref.num_bytes
        try:
            return self._lineage.read_verified(ref)
        except DamagedObject as error:
            raise DamagedCheckpoint(error.key, error.reason) from error


class Joined:
    """Boxes by tensor and objects by key, of parts one after another."""

    def __init__(self) -> None:
        self.boxes: dict[str, list[StoredBox]] = {}
        self.objects: dict[str, StoredObject] = {}

    def add(self, part: Part) -> None:
        """Raises DamagedCheckpoint where the part says another type or shape of a tensor than those before it."""
        self.objects.update((item.key, item) for item in part.objects)
        for box in part.boxes:
            known = self.boxes.setdefault(box.tensor, [])
            if known and (known[0].dtype, known[0].global_shape) != (box.dtype, box.global_shape):
                raise DamagedCheckpoint(
                    box.key, f"has {box.dtype} {list(box.global_shape)}, unlike {known[0].key}", tensor=box.tensor
                )
            known.append(box)


def build_index(parts: Iterable[Part], num_bytes: int = 0) -> Index:
    """Joins parts; DamagedCheckpoint where they disagree on a tensor's type or shape."""
    joined = Joined()
    for part in parts:
        joined.add(part)
    tensors = {
        name: StoredTensor(name, b[0].dtype, b[0].global_shape, tuple(b)) for name, b in sorted(joined.boxes.items())
    }
    return Index(tensors, joined.objects, num_bytes)
