"""A committed checkpoint's tensors by name, as they are asked for: of a checkpoint with a directory those parts are
read that hold something of what was asked, each once; of a small one all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from phalanx.core.box import Box, whole
from phalanx.lineage import Manifest, ObjectRef
from phalanx.lineage.lists import REFS_A_LIST, decode_refs
from phalanx.objects import ObjectStore
from phalanx.snapshot.directory import Catalogue, parse_catalogue, parse_shard
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.index import Index, Joined, StoredTensor, VerifiedReader, read_index, read_parts


def read_needed(store: ObjectStore, manifest: Manifest, needed: Mapping[str, Sequence[Box]]) -> Index:
    """The index as far as it takes to read the boxes in `needed`: every tensor is named, but a tensor's `boxes` may
    lack those that share no element with them. DamagedCheckpoint as by `read_index`.
    """
    return Lookup(store, manifest).index(needed)


class Lookup:
    """One checkpoint's. Safe for several threads. Every method that reads raises DamagedCheckpoint as `read_index`."""

    def __init__(self, store: ObjectStore, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._lock = threading.Lock()
        self._reader = VerifiedReader(store)
        self._whole: Index | None = None
        self._catalogue = Catalogue({}, ())
        if manifest.directory is None:
            self._whole = read_index(store, manifest)
        else:
            self._catalogue = parse_catalogue(manifest.directory.key, self._reader.read(manifest.directory))
        self._names = tuple(sorted(self._catalogue.tensors if self._whole is None else self._whole.tensors))
        self._found, self._parts_bytes = Joined(), 0
        self._read: set[int] = set()
        self._shard: tuple[int, Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]] = (-1, {})
        self._lists: dict[int, tuple[ObjectRef, ...]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors, sorted."""
        return self._names

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name; nothing is read."""
        return name in (self._catalogue.tensors if self._whole is None else self._whole.tensors)

    def tensors(self, names: Iterable[str]) -> Index:
        """These tensors alone, with all their boxes. Raises KeyError for a name that is not there."""
        if self._whole is not None:
            return Index(
                {name: self._whole.tensors[name] for name in names}, self._whole.objects, self._whole.num_bytes
            )
        needed = {name: [whole(self._catalogue.tensors[name].global_shape)] for name in names}
        with self._lock:
            self._need(needed)
            return self._index(needed)

    def index(self, needed: Mapping[str, Sequence[Box]]) -> Index:
        """See `read_needed`."""
        if self._whole is not None:
            return self._whole
        with self._lock:
            self._need(needed)
            return self._index(self._names)

    def _index(self, names: Iterable[str]) -> Index:
        found = {name: self._tensor(name) for name in names}
        return Index(found, self._found.objects, self._reader.num_bytes + self._parts_bytes)

    def _tensor(self, name: str) -> StoredTensor:
        entry = self._catalogue.tensors[name]
        boxes = tuple(self._found.boxes.get(name, ()))
        for box in boxes:
            if box.global_shape != entry.global_shape:
                raise DamagedCheckpoint(box.key, "has another shape than the directory says", tensor=name)
        return StoredTensor(name, entry.dtype, entry.global_shape, boxes)

    def _need(self, needed: Mapping[str, Sequence[Box]]) -> None:
        """Reads the parts that hold an element of a needed box and were not read yet."""
        numbers = sorted(self._parts_of(needed) - self._read)
        refs = [self._ref_of(number) for number in numbers]
        for number, part in zip(numbers, read_parts(self._store, refs), strict=True):
            self._found.add(part)
            self._read.add(number)
        self._parts_bytes += sum(ref.num_bytes for ref in refs)

    def _parts_of(self, needed: Mapping[str, Sequence[Box]]) -> set[int]:
        by_shard: dict[int, set[str]] = {}
        for name in needed:
            if name in self._catalogue.tensors:
                by_shard.setdefault(self._catalogue.tensors[name].shard, set()).add(name)
        numbers: set[int] = set()
        for shard, names in sorted(by_shard.items()):
            columns = self._columns(shard)
            for name in names & columns.keys():
                parts, offsets, shapes = columns[name]
                num_dims = offsets.shape[1]
                for box in needed[name]:
                    if len(box.shape) == num_dims:  # where not, the restore says that the shapes differ
                        first, size = np.array(box.offset, dtype=np.int64), np.array(box.shape, dtype=np.int64)
                        shared = np.minimum(offsets + shapes, first + size) > np.maximum(offsets, first)
                        numbers.update(parts[shared.all(axis=1)].tolist())
        return numbers

    def _columns(self, shard: int) -> Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each tensor in a shard: the part, offset and shape of its boxes. The last is kept: neighbours share it."""
        if self._shard[0] != shard:
            ref = self._catalogue.shards[shard]
            rows = parse_shard(ref.key, self._reader.read(ref), self._catalogue, self._catalogue.tensors)
            self._shard = shard, {name: (parts, offsets, shapes) for name, parts, offsets, shapes in rows}
        return self._shard[1]

    def _ref_of(self, number: int) -> ObjectRef:
        at, row = divmod(number, REFS_A_LIST)
        if at not in self._lists:
            ref = self._manifest.part_lists[at]
            self._lists[at] = decode_refs(ref.key, self._reader.read(ref))
        return self._lists[at][row]
