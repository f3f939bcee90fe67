"""What a committed checkpoint holds, read from its parts: every tensor with its type, shape and stored boxes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from phalanx.lineage import DamagedObject, Lineage, Manifest, ObjectRef
from phalanx.objects import ObjectStore
from phalanx.snapshot.dtypes import DTYPES, Dtype
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.parts import Part, StoredBox, StoredObject, parse_part

NUM_READERS = 4


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
    """All tensors and all objects of a checkpoint, by name and by key."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]

    def boxes_of(self, key: str) -> tuple[StoredBox, ...]:
        """The boxes that object `key` holds, in order of their bytes."""
        return tuple(sorted((b for t in self.tensors.values() for b in t.boxes if b.key == key), key=lambda b: b.start))


def read_index(store: ObjectStore, manifest: Manifest) -> Index:
    """The index of a committed checkpoint; DamagedCheckpoint names a part that is gone or not the manifest's."""
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return build_index(pool.map(lambda ref: read_part(store, ref), manifest.parts))


def read_part(store: ObjectStore, ref: ObjectRef) -> Part:
    """The part object `ref`, verified against its size and digest; DamagedCheckpoint otherwise."""
    try:
        data = Lineage(store).read_verified(ref)
    except DamagedObject as error:
        raise DamagedCheckpoint(error.key, error.reason) from error
    return parse_part(ref.key, data)


def build_index(parts: Iterable[Part]) -> Index:
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
    return Index(tensors, objects)
