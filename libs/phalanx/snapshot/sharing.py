"""Who of a group of ranks reads which bytes of a checkpoint, and to whom it hands them: a pure function of what is
stored and of the boxes that each needs, so that all ranks of the group agree without a word more.

Every chunk that somebody in the group needs is read by one of those who need it, once. So the group reads what its
boxes hold and no more, however the boxes cut the chunks: a column of a matrix shares each of its chunks with the other
columns. Bytes change hands in turns, which follow the order of the elements in the checkpoint; a turn is about
`TURN_BYTES` of the whole checkpoint, which bounds what a rank holds at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from phalanx.core.box import Box
from phalanx.snapshot.dtypes import DTYPES
from phalanx.snapshot.parts import StoredBox
from phalanx.snapshot.plan import ChunkRun, needed_chunks

PIECE_BYTES = 4 << 20
TURN_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Chunks that `reader` reads, and that all of `takers` (it among them) need. turn: when they change hands."""

    run: ChunkRun
    reader: int
    takers: tuple[int, ...]
    turn: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunks."""
        return self.run.stop - self.run.start


def shared_runs(stored: StoredBox, needs: Mapping[int, Sequence[Box]], first_byte: int) -> Iterator[SharedRun]:
    """The needed chunks of a stored box.

    needs: for each member of the group that needs something its boxes inside `stored` (global indices). first_byte:
    where the tensor begins in the order of the whole checkpoint (`first_bytes`).
    """
    members = sorted(needs)
    if not members:
        return
    needed = np.stack([needed_chunks(stored, needs[member]) for member in members])
    longest = max(1, PIECE_BYTES // stored.chunk_bytes)
    same = [0, *(np.flatnonzero((needed[:, 1:] != needed[:, :-1]).any(axis=0)) + 1).tolist(), needed.shape[1]]
    window = xxhash.xxh3_64_intdigest(stored.key.encode())
    for first, stop in itertools.pairwise(same):
        takers = tuple(member for member, row in zip(members, needed[:, first], strict=True) if row)
        for at in range(first, stop, longest) if takers else ():
            run = ChunkRun(stored, at, min(longest, stop - at))
            # Neighbours in an object go to one reader as far as they fill a piece, so that they are one read.
            reader = takers[(window + run.start // PIECE_BYTES) % len(takers)]
            yield SharedRun(run, reader, takers, (first_byte + _position(run)) // TURN_BYTES)


def first_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """Where each tensor begins when all of a checkpoint (type and shape by name) lie one after the other by name."""
    names = sorted(tensors)
    sizes = [DTYPES[tensors[name][0]].itemsize * math.prod(tensors[name][1]) for name in names]
    return dict(zip(names, itertools.accumulate(sizes, initial=0), strict=False))


def _position(run: ChunkRun) -> int:
    """Byte of the run's first element in its tensor, row-major."""
    box, itemsize = run.stored.box, run.stored.kind.itemsize
    rest = run.first * run.stored.chunk_bytes // itemsize
    position, stride = 0, 1
    for size, offset, global_size in zip(
        reversed(box.shape), reversed(box.offset), reversed(run.stored.global_shape), strict=True
    ):
        rest, index = divmod(rest, size)
        position += (offset + index) * stride
        stride *= global_size
    return position * itemsize
