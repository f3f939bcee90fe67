"""Re-reads a checkpoint and checks every digest in it: parts, whole objects, and the chunks of damaged ones to name
the tensors.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from phalanx.core.digest import xxh3
from phalanx.lineage import DamagedObject, Lineage, Manifest, ObjectRef, keys
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.snapshot import background
from phalanx.snapshot.directory import put_directory
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.fetch import read_range, verify_chunk
from phalanx.snapshot.index import NUM_PART_READERS, Index, build_index, read_part
from phalanx.snapshot.parts import Part, StoredBox, StoredObject
from phalanx.snapshot.tally import Tally

_READ_BYTES = 8 << 20
_NUM_READERS = 8


@dataclass(frozen=True, slots=True)
class DamagedChunks:
    """Chunks of a tensor's box that hold other bytes than were written, by their numbers in the box; offset: of the
    box in the tensor.
    """

    tensor: str
    offset: tuple[int, ...]
    chunks: tuple[int, ...]

    def __str__(self) -> str:
        runs = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in _runs(self.chunks))
        at = f" of the box at {list(self.offset)}" if any(self.offset) else ""
        return f"{self.tensor} (chunk {runs}{at})"


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong: the object's key, what is wrong with it, and the tensors on the damaged bytes, with
    their damaged chunks where the object could be read.
    """

    key: str
    what: str
    tensors: tuple[str, ...] = ()
    chunks: tuple[DamagedChunks, ...] = ()


def checkpoint_bytes(store: ObjectStore, manifest: Manifest) -> int:
    """Bytes that `verify` reads of tensor objects, as far as the parts can be read."""
    parts, _ = _read_parts(store, manifest)
    return sum(item.num_bytes for part in parts for item in part.objects)


def verify(
    store: ObjectStore, manifest: Manifest, progress: Callable[[int], None] = lambda _: None
) -> tuple[Damage, ...]:
    """Everything wrong with the checkpoint; empty where it is whole. `progress` hears the bytes of each read, one at a
    time; what it raises ends the check. Memory: `_NUM_READERS` reads of 8 MiB, and the parts.
    """
    parts, damages = _read_parts(store, manifest)
    damages += _check_records(store, manifest)
    damages += [] if damages else _check_directory(store, manifest, parts)
    try:
        index = build_index(parts)
    except DamagedCheckpoint as error:
        return (*damages, Damage(error.key, error.reason))
    items = tuple(index.objects.values())
    hear = _Hearing(progress)
    try:
        found = background.each(
            lambda number: _check_object(store, index, items[number], hear.hear), len(items), _NUM_READERS, "verify"
        )
    except _Over:
        assert hear.error is not None, "a thread was told why"
        raise hear.error from None
    finally:
        hear.is_over = True  # whoever interrupts this leaves no thread that reads on
    return tuple(itertools.chain(damages, *found))


class _Hearing:
    """Tells `progress` what several threads have read; each ends at its next read once one was told to stop."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress, self._lock = progress, threading.Lock()
        self.is_over = False
        self.error: BaseException | None = None

    def hear(self, num_bytes: int) -> None:
        with self._lock:
            if self.is_over:
                raise _Over
            try:
                self._progress(num_bytes)
            except BaseException as error:
                self.is_over, self.error = True, error
                raise


class _Over(Exception):
    """Another thread has ended the check, and raised why."""


def _read_parts(store: ObjectStore, manifest: Manifest) -> tuple[list[Part], list[Damage]]:
    damages: list[Damage] = []
    refs = _named(Lineage(store).part_refs(manifest), damages)

    def read(number: int) -> Part | Damage:
        try:
            return read_part(store, refs[number])
        except DamagedCheckpoint as error:
            return Damage(refs[number].key, error.reason)

    found = background.each(read, len(refs), NUM_PART_READERS, "verify parts")
    damages += [each for each in found if isinstance(each, Damage)]
    return [each for each in found if isinstance(each, Part)], damages


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
    refs = _named(lineage.records.refs_of(manifest), damages)

    def check(number: int) -> Damage | None:
        try:
            lineage.records.read(refs[number])
        except DamagedObject as error:
            return Damage(refs[number].key, error.reason)
        return None

    found = background.each(check, len(refs), NUM_PART_READERS, "verify records")
    return damages + [each for each in found if each is not None]


def _check_object(
    store: ObjectStore, index: Index, item: StoredObject, progress: Callable[[int], None]
) -> list[Damage]:
    digest = xxhash.xxh3_128()
    try:
        num_bytes = store.info(item.key).num_bytes
        if num_bytes != item.num_bytes:
            return [_damaged(store, index, item, f"has {num_bytes} bytes, its part says {item.num_bytes}")]
        for start in range(0, item.num_bytes, _READ_BYTES):
            data = store.read(item.key, start, min(_READ_BYTES, item.num_bytes - start))
            digest.update(data)
            progress(len(data))
    except ObjectMissing:
        return [Damage(item.key, "is gone", tuple(sorted({box.tensor for box in index.boxes_of(item.key)})))]
    found = f"xxh3:{digest.hexdigest()}"
    if found == item.digest:
        return []
    return [_damaged(store, index, item, f"has the digest {found}, its part says {item.digest}")]


def _damaged(store: ObjectStore, index: Index, item: StoredObject, what: str) -> Damage:
    """The damage of an object that is there, with the tensors and chunks that it spoils."""
    boxes = [(box, _damaged_chunks(store, item, box)) for box in index.boxes_of(item.key)]
    chunks = tuple(DamagedChunks(box.tensor, box.box.offset, numbers) for box, numbers in boxes if numbers)
    tensors = tuple(sorted({each.tensor for each in chunks}))
    return Damage(item.key, what if chunks else f"{what} (no tensor's bytes are changed)", tensors, chunks)


def _damaged_chunks(store: ObjectStore, item: StoredObject, box: StoredBox) -> tuple[int, ...]:
    """The numbers of the chunks of `box` that cannot be read as they were written."""
    return tuple(number for number in range(len(box.chunks)) if not _is_whole(store, item, box, number))


def _is_whole(store: ObjectStore, item: StoredObject, box: StoredBox, number: int) -> bool:
    start = box.start + number * box.chunk_bytes
    try:
        data = read_range(store, item, start, min(start + box.chunk_bytes, box.start + box.num_bytes))
        verify_chunk(box, number, data)
    except DamagedCheckpoint:
        return False
    return True


def _runs(numbers: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First and last of each run of following numbers."""
    for _, group in itertools.groupby(enumerate(numbers), key=lambda each: each[1] - each[0]):
        run = [number for _, number in group]
        yield run[0], run[-1]
