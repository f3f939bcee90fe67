"""Which bytes a rank must read for the boxes it needs: a pure function of what it needs and what is stored.

A stored box is verified in chunks, so whole chunks are read, and only those that hold a needed element. Chunks that lie
side by side in an object, of one box or of neighbours, are joined to one ranged read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.core.box import Box
from phalanx.snapshot.parts import StoredBox

GAP_BYTES = 64 << 10
READ_BYTES = 16 << 20
_GAP_SHARE = 32


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Chunks [first, first + len) of a stored box, adjacent in its object."""

    stored: StoredBox
    first: int
    count: int

    @property
    def start(self) -> int:
        """First byte, in the object's data."""
        return self.stored.start + self.first * self.stored.chunk_bytes

    @property
    def stop(self) -> int:
        """Byte behind the last, in the object's data."""
        return self.stored.start + min(self.stored.num_bytes, (self.first + self.count) * self.stored.chunk_bytes)


@dataclass(frozen=True, slots=True)
class Read:
    """One ranged read of an object's data, [start, stop), and the runs of chunks that it brings."""

    key: str
    start: int
    stop: int
    runs: tuple[ChunkRun, ...]


def needed_chunks(stored: StoredBox, wanted: Sequence[Box]) -> np.ndarray:
    """bool [num_chunks]: which chunks hold an element of one of `wanted` (boxes inside `stored`, global indices)."""
    edges = np.zeros(len(stored.chunks) + 1, dtype=np.int64)
    for box in wanted:
        starts, num_elements = _contiguous_runs(stored.box, box)
        first = starts * stored.kind.itemsize
        last = first + num_elements * stored.kind.itemsize - 1
        np.add.at(edges, first // stored.chunk_bytes, 1)
        np.add.at(edges, last // stored.chunk_bytes + 1, -1)
    return np.cumsum(edges[:-1]) > 0


def chunk_runs(stored: StoredBox, needed: np.ndarray, read_bytes: int = READ_BYTES) -> list[ChunkRun]:
    """The needed chunks as runs of at most `read_bytes` (at least one chunk)."""
    longest = max(1, read_bytes // stored.chunk_bytes)
    runs: list[ChunkRun] = []
    for is_needed, group in itertools.groupby(range(len(needed)), key=lambda at: bool(needed[at])):
        numbers = list(group)
        if is_needed:
            runs += [ChunkRun(stored, at, min(longest, numbers[-1] + 1 - at)) for at in numbers[::longest]]
    return runs


def coalesced(runs: Iterable[ChunkRun], read_bytes: int = READ_BYTES, gap_bytes: int = GAP_BYTES) -> list[Read]:
    """Reads that bring all `runs`: neighbours in one object are joined, up to `read_bytes` a read; over gaps of up to
    `gap_bytes`, where all the gaps of a read stay below a 32nd of what it spans.
    """
    reads: list[list[ChunkRun]] = []
    gaps_bytes = 0
    for run in sorted(runs, key=lambda r: (r.stored.key, r.start)):
        last = reads[-1] if reads else []
        if last and last[-1].stored.key == run.stored.key and run.stop - last[0].start <= read_bytes:
            gap = max(0, run.start - last[-1].stop)
            if gap <= gap_bytes and gaps_bytes + gap <= (last[-1].stop - last[0].start) // _GAP_SHARE:
                last.append(run)
                gaps_bytes += gap
                continue
        reads.append([run])
        gaps_bytes = 0
    return [Read(group[0].stored.key, group[0].start, max(run.stop for run in group), tuple(group)) for group in reads]


def _contiguous_runs(outer: Box, inner: Box) -> tuple[np.ndarray, int]:
    """Row-major element offsets in `outer` at which runs of `inner` (inside it, not empty) start, int64 [n]; and a
    run's length.
    """
    num_dims = len(outer.shape)
    axis = num_dims  # the run spans the axes from here on
    length = 1
    while axis > 0:
        axis -= 1
        length *= inner.shape[axis]
        if inner.shape[axis] != outer.shape[axis]:
            break
    strides = [1] * num_dims
    for d in range(num_dims - 2, -1, -1):
        strides[d] = strides[d + 1] * outer.shape[d + 1]
    starts = np.zeros(1, dtype=np.int64)
    for d in range(num_dims):
        first = inner.offset[d] - outer.offset[d]
        steps = (
            np.arange(first, first + inner.shape[d], dtype=np.int64) if d < axis else np.array([first], dtype=np.int64)
        )
        starts = (starts[:, None] + steps[None, :] * strides[d]).reshape(-1)
    return starts, length
