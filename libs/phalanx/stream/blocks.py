"""One block of the order: the documents of a few shards, mixed by one permutation; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.core.philox import permutation
from phalanx.stream.segments import SegmentColumns
from phalanx.stream.shards import ShardIndex

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Documents of a block in reading order: starts int64 [d + 1] within the block, where each lies, and `rank_of` its
    inverse.

    first_of_slot: number (before the permutation) of the first document of the block's k-th shard, int64 [shards + 1].
    """

    starts: Int64Array
    shard: Int64Array
    member: Int64Array
    offset: Int64Array
    document: Int64Array
    rank_of: Int64Array
    first_of_slot: Int64Array

    @property
    def num_tokens(self) -> int:
        """Tokens of the block."""
        return int(self.starts[-1])

    def cut(self, start: int, stop: int) -> SegmentColumns:
        """Segments of the tokens [start, stop) of the block, start < stop."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        return self._segments(slice(first, last), slice(first + 1, last + 1), start, stop)

    def cut_many(self, starts: Int64Array, stops: Int64Array) -> tuple[SegmentColumns, Int64Array]:
        """Segments of the tokens [starts, stops) of the block, range after range, and each segment's range; int64 [n],
        each start < its stop.
        """
        firsts = np.searchsorted(self.starts, starts, side="right") - 1
        counts = np.searchsorted(self.starts, stops, side="left") - firsts
        range_of = np.repeat(np.arange(len(starts)), counts)
        part = np.arange(len(range_of)) + (firsts - np.cumsum(counts) + counts)[range_of]
        return self._segments(part, part + 1, starts[range_of], stops[range_of]), range_of

    def _segments(
        self,
        part: slice | Int64Array,
        behind: slice | Int64Array,
        start: int | Int64Array,
        stop: int | Int64Array,
    ) -> SegmentColumns:
        """What of the documents `part` (`behind`: the same, one further) lies between start and stop."""
        begins, ends = self.starts[part], self.starts[behind]
        cut_begins: Int64Array = np.maximum(begins, start)
        cut_ends: Int64Array = np.minimum(ends, stop)
        return SegmentColumns(
            shard=self.shard[part],
            member=self.member[part],
            offset=self.offset[part] + (cut_begins - begins),
            length=cut_ends - cut_begins,
            document=self.document[part],
            starts_document=cut_begins == begins,
            ends_document=cut_ends == ends,
        )


def make_block(shards: Int64Array, indices: Sequence[ShardIndex], key: tuple[int, int]) -> Block:
    """The block of these shards, int64 [n], and their indices, mixed by the permutation of `key`."""
    counts = [len(index.lengths) for index in indices]
    order = permutation(sum(counts), key)
    rank_of = np.empty_like(order)
    rank_of[order] = np.arange(len(order))
    places = [_places(index) for index in indices]
    return Block(
        starts=running_sum(np.concatenate([index.lengths for index in indices])[order]),
        shard=np.repeat(shards, counts)[order],
        member=np.concatenate([member for member, _ in places])[order],
        offset=np.concatenate([offset for _, offset in places])[order],
        document=np.concatenate([np.arange(count) for count in counts])[order],
        rank_of=rank_of,
        first_of_slot=running_sum(np.array(counts)),
    )


def running_sum(lengths: NDArray[np.integer]) -> Int64Array:
    """Running sum with a leading 0, int64 [n + 1]."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _places(index: ShardIndex) -> tuple[Int64Array, Int64Array]:
    """Member of each document of a shard, and its first token's offset inside that member; int64 [documents] each."""
    member = np.repeat(np.arange(index.num_members, dtype=np.int64), index.member_documents)
    starts = running_sum(index.lengths)
    return member, starts[:-1] - starts[index.member_first_documents()[:-1]][member]
