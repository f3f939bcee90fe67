"""Re-reads a checkpoint and checks every digest in it: parts, whole objects, and the chunks of damaged ones to name the
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from phalanx.core.digest import xxh3
from phalanx.lineage import DamagedObject, Lineage, Manifest, ObjectRef, keys
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.snapshot.directory import put_directory
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.fetch import read_range, verify_chunk
from phalanx.snapshot.index import Index, build_index, read_part
from phalanx.snapshot.parts import Part, StoredBox, StoredObject
from phalanx.snapshot.tally import Tally

_READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong: the object's key, what is wrong with it, and the tensors on the damaged bytes."""

    key: str
    what: str
    tensors: tuple[str, ...] = ()


def checkpoint_bytes(store: ObjectStore, manifest: Manifest) -> int:
    """Bytes that `verify` reads of tensor objects, as far as the parts can be read."""
    parts, _ = _read_parts(store, manifest)
    return sum(item.num_bytes for part in parts for item in part.objects)


def verify(
    store: ObjectStore, manifest: Manifest, progress: Callable[[int], None] = lambda _: None
) -> tuple[Damage, ...]:
    """Everything wrong with the checkpoint; empty where it is whole. `progress` hears the bytes of each read."""
    parts, damages = _read_parts(store, manifest)
    damages += _check_records(store, manifest)
    damages += [] if damages else _check_directory(store, manifest, parts)
    try:
        index = build_index(parts)
    except DamagedCheckpoint as error:
        return (*damages, Damage(error.key, error.reason))
    for item in index.objects.values():
        damages += _check_object(store, index, item, progress)
    return tuple(damages)


def _read_parts(store: ObjectStore, manifest: Manifest) -> tuple[list[Part], list[Damage]]:
    parts: list[Part] = []
    damages: list[Damage] = []
    for ref in _named(Lineage(store).part_refs(manifest), damages):
        try:
            parts.append(read_part(store, ref))
        except DamagedCheckpoint as error:
            damages.append(Damage(ref.key, error.reason))
    return parts, damages


def _named(refs: Iterator[ObjectRef], damages: list[Damage]) -> list[ObjectRef]:
    """The objects that a manifest and its lists name, up to a list that is damaged, which is told."""
    found: list[ObjectRef] = []
    try:
        for ref in refs:
            found.append(ref)  # noqa: PERF402 - those before a damaged list count
    except DamagedObject as error:
        damages.append(Damage(error.key, error.reason))
    return found


def _check_directory(store: ObjectStore, manifest: Manifest, parts: list[Part]) -> list[Damage]:
    """The directory must say of all boxes what the parts say."""
    if manifest.directory is None:
        return []
    tally = Tally()
    damages: list[Damage] = []

    def check(data: bytes) -> ObjectRef:
        ref = ObjectRef(keys.directory(manifest.ref, xxh3(data)), len(data), xxh3(data))
        try:
            Lineage(store).read_verified(ref)
        except DamagedObject as error:
            damages.append(Damage(error.key, error.reason))
        return ref

    try:
        for part in parts:
            tally.add(part)
    except DamagedCheckpoint:
        return []  # told where the parts are joined
    if put_directory(tally.tables, check) != manifest.directory:
        damages.append(Damage(manifest.directory.key, "does not say what the parts say"))
    return damages


def _check_records(store: ObjectStore, manifest: Manifest) -> list[Damage]:
    lineage = Lineage(store)
    damages: list[Damage] = []
    for ref in _named(lineage.record_refs(manifest), damages):
        try:
            lineage.read_records(ref)
        except DamagedObject as error:
            damages.append(Damage(ref.key, error.reason))
    return damages


def _check_object(
    store: ObjectStore, index: Index, item: StoredObject, progress: Callable[[int], None]
) -> list[Damage]:
    digest = xxhash.xxh3_128()
    try:
        num_bytes = store.info(item.key).num_bytes
        if num_bytes != item.num_bytes:
            return [Damage(item.key, f"has {num_bytes} bytes, its part says {item.num_bytes}")]
        for start in range(0, item.num_bytes, _READ_BYTES):
            data = store.read(item.key, start, min(_READ_BYTES, item.num_bytes - start))
            digest.update(data)
            progress(len(data))
    except ObjectMissing:
        return [Damage(item.key, "is gone")]
    if f"xxh3:{digest.hexdigest()}" == item.digest:
        return []
    tensors = sorted({box.tensor for box in index.boxes_of(item.key) if not _box_is_whole(store, item, box)})
    where = "" if tensors else " (in its header)"
    return [
        Damage(
            item.key, f"has the digest xxh3:{digest.hexdigest()}, its part says {item.digest}{where}", tuple(tensors)
        )
    ]


def _box_is_whole(store: ObjectStore, item: StoredObject, box: StoredBox) -> bool:
    for number in range(len(box.chunks)):
        start = box.start + number * box.chunk_bytes
        try:
            data = read_range(store, item, start, min(start + box.chunk_bytes, box.start + box.num_bytes))
            verify_chunk(box, number, memoryview(data))
        except DamagedCheckpoint:
            return False
    return True
