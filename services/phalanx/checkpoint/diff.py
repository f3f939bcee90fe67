"""What differs between two checkpoints, tensor by tensor: which are only in one, of another shape or type, or hold
other bits, and by how much.

Where both cut a tensor into the same boxes, equal digests of its chunks (XXH3-64 of each MiB) say that it is equal, and
nothing of it is read. All others pass slab by slab, so memory is about that of the largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from phalanx.checkpoint.diff_norms import Norms, Sums
from phalanx.core.box import Box, whole
from phalanx.lineage import Manifest
from phalanx.objects import ObjectStore
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.index import Index, StoredTensor, read_index
from phalanx.snapshot.slabs import Slab, batches, read_slabs, slab_bytes_for


class Finding(StrEnum):
    """What became of a tensor from A to B."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    ONLY_IN_A = "only in A"
    ONLY_IN_B = "only in B"
    OTHER_SHAPE = "other shape"
    OTHER_DTYPE = "other type"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor. a, b: type and shape on each side, None where it is not there. norms: of a changed one. damage: what
    is wrong with the stored bytes, and where.
    """

    name: str
    finding: Finding
    a: str | None
    b: str | None
    norms: Norms | None = None
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    store: ObjectStore
    index: Index

    @classmethod
    def of(cls, store: ObjectStore, manifest: Manifest) -> Side:
        """Reads what the checkpoint consists of; raises DamagedCheckpoint."""
        return cls(store, read_index(store, manifest))


class Comparison:
    """Two checkpoints, compared as far as their indexes tell. `num_bytes`: what is left to read, of both."""

    def __init__(self, a: Side, b: Side) -> None:
        self._a, self._b = a, b
        names = sorted(a.index.tensors.keys() | b.index.tensors.keys())
        self._known = {name: _known(a.index.tensors.get(name), b.index.tensors.get(name)) for name in names}
        self._open = [a.index.tensors[name] for name, found in self._known.items() if found is None]
        self.num_bytes = 2 * sum(Slab(tensor, whole(tensor.global_shape)).num_bytes for tensor in self._open)

    def run(self, progress: Callable[[int], None] = lambda _: None) -> tuple[TensorDiff, ...]:
        """Reads the rest; every tensor, by name. `progress` hears the bytes of each read."""
        read = self._compared(progress)
        return tuple(self._diff(name, found or read[name]) for name, found in self._known.items())

    def _diff(self, name: str, found: Finding | Norms | DamagedCheckpoint) -> TensorDiff:
        a, b = (_described(side.index.tensors.get(name)) for side in (self._a, self._b))
        if isinstance(found, DamagedCheckpoint):
            return TensorDiff(name, Finding.DAMAGED, a, b, damage=str(found))
        if isinstance(found, Finding):
            return TensorDiff(name, found, a, b)
        if found.num_changed:
            return TensorDiff(name, Finding.CHANGED, a, b, found)
        return TensorDiff(name, Finding.UNCHANGED, a, b)

    def _compared(self, progress: Callable[[int], None]) -> dict[str, Norms | DamagedCheckpoint]:
        sums = {tensor.name: Sums() for tensor in self._open}
        damaged: dict[str, DamagedCheckpoint] = {}
        for batch in batches(self._open, slab_bytes_for(self._open)):
            self._take([slab for slab in batch if slab.tensor.name not in damaged], sums, damaged)
            progress(2 * sum(slab.num_bytes for slab in batch))
        return {name: damaged.get(name) or found.norms() for name, found in sums.items()}

    def _take(self, batch: Sequence[Slab], sums: Mapping[str, Sums], damaged: dict[str, DamagedCheckpoint]) -> None:
        """Reads both sides of each slab; in a batch that holds damage each by itself."""
        theirs = [Slab(self._b.index.tensors[slab.tensor.name], slab.box) for slab in batch]
        try:
            a = read_slabs(self._a.store, self._a.index, batch)
            b = read_slabs(self._b.store, self._b.index, theirs)
        except DamagedCheckpoint as error:
            if len(batch) == 1:
                damaged[batch[0].tensor.name] = error
                return
            for slab in batch:
                self._take([slab], sums, damaged)
            return
        for slab, x, y in zip(batch, a, b, strict=True):
            sums[slab.tensor.name].add(x, y, slab.tensor.dtype)


def _known(a: StoredTensor | None, b: StoredTensor | None) -> Finding | None:
    """What can be said of a tensor without reading it; None where it has to be read."""
    if a is None:
        return Finding.ONLY_IN_B
    if b is None:
        return Finding.ONLY_IN_A
    if a.global_shape != b.global_shape:
        return Finding.OTHER_SHAPE
    if a.dtype != b.dtype:
        return Finding.OTHER_DTYPE
    return Finding.UNCHANGED if _chunks(a) == _chunks(b) else None


def _chunks(tensor: StoredTensor) -> Mapping[Box, tuple[int, tuple[str, ...]]]:
    """The digests of each box's chunks, and how long a chunk is."""
    return {stored.box: (stored.chunk_bytes, stored.chunks) for stored in tensor.boxes}


def _described(tensor: StoredTensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype} {list(tensor.global_shape)}"
