"""The order in which tokens are read: a pure function of (manifest, seed), the same for every world size, layout and
worker count.

Two levels. Epoch e permutes all shards; each run of `shuffle_block_shards` shards in that permutation is a block, and
the manifest's totals give every block its token offset. Inside a block one permutation mixes all its documents; it
needs the lengths of these documents alone, from the indices of the block's shards, fetched on demand. So any position
is found without reading what lies before it.

The epochs follow each other on one endless token stream, cut by one grid: window p has the inputs [p S, (p + 1) S),
with S = seq_len, and the target of its last input is the first token of window p + 1. A window may span the end of an
epoch, or (on tiny data) several.

Memory: 16 bytes a shard for each of the two epochs kept, and a few open blocks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.core.philox import key_of, permutation
from phalanx.stream.shards import ShardIndex
from phalanx.stream.spans import merged

OPEN_EPOCHS = 2
OPEN_BLOCKS = 4

_Value = TypeVar("_Value")


class HasShardTokens(Protocol):
    """What the order needs of a split's manifest."""

    @property
    def shard_tokens(self) -> NDArray[np.int64]:
        """Tokens of each shard in the manifest's order, int64 [num_shards], each at least 1."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one document. document: its number in the shard; offset: of the first token, inside the
    member's tokens.
    """

    shard: int
    member: int
    offset: int
    length: int
    document: int
    starts_document: bool
    ends_document: bool


@dataclass(frozen=True, slots=True, eq=False)
class SegmentColumns:
    """Segments in reading order as columns [num_segments]; fields as in Segment."""

    shard: NDArray[np.int64]
    member: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    document: NDArray[np.int64]
    starts_document: NDArray[np.bool_]
    ends_document: NDArray[np.bool_]

    def rows(self) -> tuple[Segment, ...]:
        """The same as one Segment each."""
        columns = (
            self.shard,
            self.member,
            self.offset,
            self.length,
            self.document,
            self.starts_document,
            self.ends_document,
        )
        return tuple(Segment(*row) for row in zip(*(column.tolist() for column in columns), strict=True))


_FIELDS = tuple(SegmentColumns.__dataclass_fields__)
_NONE = np.zeros(0, np.int64)
NO_SEGMENTS = SegmentColumns(_NONE, _NONE, _NONE, _NONE, _NONE, np.zeros(0, np.bool_), np.zeros(0, np.bool_))


@dataclass(frozen=True, slots=True, eq=False)
class _Epoch:
    """shards int64 [n], permuted; starts int64 [n + 1], the token at which each begins within the epoch."""

    shards: NDArray[np.int64]
    starts: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Documents of a block in reading order: starts int64 [d + 1] within the block, where each lies, and `rank_of` its
    inverse.

    first_of_slot: number (before the permutation) of the first document of the block's k-th shard, int64 [shards + 1].
    """

    starts: NDArray[np.int64]
    shard: NDArray[np.int64]
    member: NDArray[np.int64]
    offset: NDArray[np.int64]
    document: NDArray[np.int64]
    rank_of: NDArray[np.int64]
    first_of_slot: NDArray[np.int64]

    def cut(self, start: int, stop: int) -> SegmentColumns:
        """Segments of the tokens [start, stop) of the block."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        begins, ends = self.starts[first:last], self.starts[first + 1 : last + 1]
        cut_begins: NDArray[np.int64] = np.maximum(begins, start)
        cut_ends: NDArray[np.int64] = np.minimum(ends, stop)
        part = slice(first, last)
        return SegmentColumns(
            shard=self.shard[part],
            member=self.member[part],
            offset=self.offset[part] + (cut_begins - begins),
            length=cut_ends - cut_begins,
            document=self.document[part],
            starts_document=cut_begins == begins,
            ends_document=cut_ends == ends,
        )


class Order:
    """Finds the segments of any window, and the windows of any document.

    index_of: the length index of a shard by its number; who reads in this order uses the same. Safe to use from several
    threads, as index_of must be.
    """

    def __init__(
        self,
        split: HasShardTokens,
        seed: int,
        seq_len: int,
        shuffle_block_shards: int,
        index_of: Callable[[int], ShardIndex],
    ) -> None:
        self._shard_tokens = split.shard_tokens
        assert len(self._shard_tokens) > 0 and self._shard_tokens.min() > 0 and seq_len > 0 and shuffle_block_shards > 0
        self.seed, self.seq_len, self.shuffle_block_shards = seed, seq_len, shuffle_block_shards
        self.epoch_tokens = int(self._shard_tokens.sum())
        self.index_of = index_of
        self._epochs: OrderedDict[Hashable, _Epoch] = OrderedDict()
        self._blocks: OrderedDict[Hashable, _Block] = OrderedDict()
        self._lock = threading.RLock()

    def segments(self, position: int) -> tuple[Segment, ...]:
        """The segments whose tokens are the inputs of window `position`, in order."""
        return self.window(position).rows()

    def window(self, position: int) -> SegmentColumns:
        """As `segments`, in columns."""
        assert position >= 0
        return self.between(position * self.seq_len, (position + 1) * self.seq_len)

    def between(self, start: int, stop: int) -> SegmentColumns:
        """Segments of the tokens [start, stop) of the endless stream."""
        parts = []
        while start < stop:
            epoch, number, block_start = self._block_at(start)
            block = self._block(epoch, number)
            count = min(stop, block_start + int(block.starts[-1])) - start
            parts.append(block.cut(start - block_start, start - block_start + count))
            start += count
        if len(parts) == 1:
            return parts[0]
        return SegmentColumns(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS})

    def count_document_ends(self, start: int, stop: int) -> int:
        """Documents whose last token lies in [start, stop) of the stream."""
        total = 0
        while start < stop:
            epoch, number, block_start = self._block_at(start)
            ends = self._block(epoch, number).starts[1:] + block_start
            total += int(np.searchsorted(ends, stop, side="right") - np.searchsorted(ends, start, side="right"))
            start = int(ends[-1])
        return total

    def tokens_of(self, epoch: int, shard: int, document: int) -> tuple[int, int]:
        """Where a document of a shard lies in epoch `epoch`: the half-open token range of the stream."""
        block, block_start, first = self._holding(epoch, shard)
        rank = int(block.rank_of[first + document])
        return block_start + int(block.starts[rank]), block_start + int(block.starts[rank + 1])

    def positions_of(self, epoch: int, shard: int, document: int) -> range:
        """Windows that have tokens of the document among their inputs."""
        start, stop = self.tokens_of(epoch, shard, document)
        return range(start // self.seq_len, (stop - 1) // self.seq_len + 1)

    def positions_reading(self, epoch: int, shard: int, member: int) -> NDArray[np.int64]:
        """Windows of an epoch that may need bytes of one member, as inputs or as the last target: what its damage
        costs; sorted.
        """
        block, block_start, first = self._holding(epoch, shard)
        bounds = self.index_of(shard).member_first_documents()[member : member + 2] + first
        ranks = block.rank_of[bounds[0] : bounds[1]]
        begins, ends = block.starts[ranks] + block_start, block.starts[ranks + 1] + block_start
        firsts, lasts = np.maximum(begins - 1, 0) // self.seq_len, (ends - 1) // self.seq_len
        return np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(firsts, lasts, strict=True)]))

    def spans_of_shard(self, epoch: int, shard: int) -> NDArray[np.int64]:
        """Windows that have tokens of a shard among their inputs in an epoch, as half-open ranges int64 [k, 2] that
        neither overlap nor touch; they may begin before the epoch and end behind it.
        """
        block, block_start, first = self._holding(epoch, shard)
        ranks = block.rank_of[first : first + len(self.index_of(shard).lengths)]
        begins, ends = block.starts[ranks] + block_start, block.starts[ranks + 1] + block_start
        return merged(np.stack([begins // self.seq_len, (ends - 1) // self.seq_len + 1], axis=1))

    def span_of_block(self, epoch: int, shard: int) -> tuple[int, int]:
        """Windows that have tokens of the block that holds a shard in an epoch: those that can't be made without the
        shard's index. From the manifest alone.
        """
        plan = self._epoch(epoch)
        slot = int(np.flatnonzero(plan.shards == shard)[0])
        first = slot - slot % self.shuffle_block_shards
        last = min(first + self.shuffle_block_shards, len(plan.shards))
        start = epoch * self.epoch_tokens
        begin, end = start + int(plan.starts[first]), start + int(plan.starts[last])
        return begin // self.seq_len, (end - 1) // self.seq_len + 1

    def epoch_of(self, position: int) -> int:
        """Epoch of the window's first token."""
        return position * self.seq_len // self.epoch_tokens

    def epoch_of_last(self, position: int) -> int:
        """Epoch of the window's last token."""
        return ((position + 1) * self.seq_len - 1) // self.epoch_tokens

    def _holding(self, epoch: int, shard: int) -> tuple[_Block, int, int]:
        """The block that has `shard` in `epoch`, the block's first token in the stream, the shard's first document in
        the block.
        """
        plan = self._epoch(epoch)
        number, slot = divmod(int(np.flatnonzero(plan.shards == shard)[0]), self.shuffle_block_shards)
        block = self._block(epoch, number)
        block_start = epoch * self.epoch_tokens + int(plan.starts[number * self.shuffle_block_shards])
        return block, block_start, int(block.first_of_slot[slot])

    def _block_at(self, token: int) -> tuple[int, int, int]:
        """Epoch and block number that hold a token of the stream, and the block's first token."""
        epoch, within = divmod(token, self.epoch_tokens)
        starts = self._epoch(epoch).starts
        number = (int(np.searchsorted(starts, within, side="right")) - 1) // self.shuffle_block_shards
        return epoch, number, epoch * self.epoch_tokens + int(starts[number * self.shuffle_block_shards])

    def _epoch(self, epoch: int) -> _Epoch:
        return self._kept(self._epochs, epoch, OPEN_EPOCHS, lambda: self._permute_shards(epoch))

    def _block(self, epoch: int, number: int) -> _Block:
        return self._kept(self._blocks, (epoch, number), OPEN_BLOCKS, lambda: self._permute_documents(epoch, number))

    def _kept(
        self, kept: OrderedDict[Hashable, _Value], key: Hashable, capacity: int, make: Callable[[], _Value]
    ) -> _Value:
        with self._lock:
            if key not in kept:
                kept[key] = make()
            kept.move_to_end(key)
            while len(kept) > capacity:
                kept.popitem(last=False)
            return kept[key]

    def _permute_shards(self, epoch: int) -> _Epoch:
        shards = permutation(len(self._shard_tokens), key_of("stream.order.shards", self.seed, epoch))
        return _Epoch(shards, _starts(self._shard_tokens[shards]))

    def _permute_documents(self, epoch: int, number: int) -> _Block:
        first = number * self.shuffle_block_shards
        shards = self._epoch(epoch).shards[first : first + self.shuffle_block_shards]
        indices = [self.index_of(int(shard)) for shard in shards]
        counts = [len(index.lengths) for index in indices]
        order = permutation(sum(counts), key_of("stream.order.documents", self.seed, epoch, number))
        rank_of = np.empty_like(order)
        rank_of[order] = np.arange(len(order))
        places = [_places(index) for index in indices]
        return _Block(
            starts=_starts(np.concatenate([index.lengths for index in indices])[order]),
            shard=np.repeat(shards, counts)[order],
            member=np.concatenate([member for member, _ in places])[order],
            offset=np.concatenate([offset for _, offset in places])[order],
            document=np.concatenate([np.arange(count) for count in counts])[order],
            rank_of=rank_of,
            first_of_slot=_starts(np.array(counts)),
        )


def _starts(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Running sum with a leading 0, int64 [n + 1]."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _places(index: ShardIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Member of each document of a shard, and its first token's offset inside that member; int64 [documents] each."""
    member = np.repeat(np.arange(index.num_members, dtype=np.int64), index.member_documents)
    starts = _starts(index.lengths)
    return member, starts[:-1] - starts[index.member_first_documents()[:-1]][member]
