"""What a step record keeps of the windows read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.stream.parts import parts, parts_of_places, slices
from phalanx.stream.segments import SegmentColumns, joined

_AT_ONCE = 16


@dataclass(frozen=True, slots=True, eq=False)
class ReadRows:
    """Record columns of the windows read, surplus slots left out; n windows, m segments.

    position int64 [n]; weight float32 [n]: 1, or 0 where the journal takes the window out; xxh3 uint64 [n]: XXH3-64
    over the window's input tokens as little-endian uint32, as the model received them. segment_window int64 [m]: row of
    the segment's window; shard (counted through over all sources), member, offset (tokens inside the member), length
    (tokens): int64 [m]. A window of weight 0 lists the segments it stands for, though their bytes were not read; none
    where the index that would tell them is damaged.
    """

    position: NDArray[np.int64]
    weight: NDArray[np.float32]
    xxh3: NDArray[np.uint64]
    segment_window: NDArray[np.int64]
    shard: NDArray[np.int64]
    member: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]

    def split(self, edges: NDArray[np.int64]) -> list[ReadRows]:
        """The windows between each two of `edges`, int64 [parts + 1], from 0 to n, as rows of their own."""
        windows, segments = slices(edges), slices(np.searchsorted(self.segment_window, edges))
        columns = (
            *(parts(column, windows) for column in (self.position, self.weight, self.xxh3)),
            parts_of_places(self.segment_window, edges),
            *(parts(column, segments) for column in (self.shard, self.member, self.offset, self.length)),
        )
        return [ReadRows(*each) for each in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class SlotSegments:
    """Segments of some slots: slot int64 [m], the slot that each segment belongs to."""

    segments: SegmentColumns
    slot: NDArray[np.int64]
    first_shard: int


def rows_of(
    positions: NDArray[np.int64], is_row: NDArray[np.bool_], weights: NDArray[np.float32], digests: NDArray[np.uint64],
    read: Sequence[SlotSegments],
) -> ReadRows:  # fmt: skip
    """The rows of the slots where `is_row`, in the order of the slots. positions, is_row, weights: [slots]; digests: of
    the rows alone. The segments of one slot are in one of `read`.
    """
    none, segments = np.zeros(0, np.int64), joined([part.segments for part in read])
    slot = np.concatenate([none, *(part.slot for part in read)])
    shard = np.concatenate([none, *(part.segments.shard + part.first_shard for part in read)])
    columns = [slot, shard, segments.member, segments.offset, segments.length]
    if (slot[1:] < slot[:-1]).any():
        order = np.argsort(slot, kind="stable")
        columns = [column[order] for column in columns]
    slot, shard, member, offset, length = columns
    return ReadRows(
        position=positions[is_row],
        weight=weights[is_row],
        xxh3=digests,
        segment_window=slot if is_row.all() else (np.cumsum(is_row) - 1)[slot],
        shard=shard,
        member=member,
        offset=offset,
        length=length,
    )


def tokens_xxh3(tokens: NDArray[np.integer]) -> int:
    """The digest that a step record keeps of a window: XXH3-64 over its tokens as little-endian uint32."""
    return int(xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, dtype="<u4").data))


def digests_of(windows: NDArray[np.unsignedinteger]) -> NDArray[np.uint64]:
    """`tokens_xxh3` of each row of [n, S], uint64 [n]."""
    num_tokens, digests = windows.shape[1], list[int]()
    wide = np.empty((_AT_ONCE, num_tokens), "<u4")  # stays in the core's cache
    size, view = wide.itemsize * num_tokens, memoryview(wide.data).cast("B")
    rows = [view[start : start + size] for start in range(0, size * _AT_ONCE, size)]
    for first in range(0, len(windows), _AT_ONCE):
        part = windows[first : first + _AT_ONCE]
        np.copyto(wide[: len(part)], part)
        digests += map(xxhash.xxh3_64_intdigest, rows[: len(part)])
    return np.array(digests, dtype=np.uint64)
