"""The order in which tokens are read: a pure function of (manifest, seed), the same for every world size, layout and
worker count.

Two levels. Epoch e permutes all shards; each run of `shuffle_block_shards` shards in that permutation is a block, and
the manifest's totals give every block its token offset. Inside a block one permutation mixes all its documents; it
needs the lengths of these documents alone, from the indices of the block's shards, fetched on demand. So any position
is found without reading what lies before it.

The epochs follow each other on one endless token stream, cut by one grid: window p has the inputs [p S, (p + 1) S),
with S = seq_len, and the target of its last input is the first token of window p + 1. A window may span the end of an
epoch, or (on tiny data) several.

Memory: 4 bytes a shard and 8 a block for each of the two epochs kept, and a few open blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.core.philox import key_of, permutation
from phalanx.stream.blocks import Block, make_block, running_sum
from phalanx.stream.recent import Recent
from phalanx.stream.segments import NO_SEGMENTS, Segment, SegmentColumns, joined
from phalanx.stream.shards import ShardIndex
from phalanx.stream.spans import merged

__all__ = ["NO_SEGMENTS", "HasShardTokens", "Order", "Segment", "SegmentColumns"]

OPEN_EPOCHS = 2
OPEN_BLOCKS = 4
_SHARDS_AT_ONCE = 1 << 13  # small arrays are made of memory used before; fresh memory costs more than the sums


class HasShardTokens(Protocol):
    """What the order needs of a split's manifest."""

    @property
    def shard_tokens(self) -> NDArray[np.int64]:
        """Tokens of each shard in the manifest's order, int64 [num_shards], each at least 1."""


@dataclass(frozen=True, slots=True, eq=False)
class _Epoch:
    """shards uint32 [num_shards], permuted; starts int64 [num_blocks + 1], the token at which each block begins within
    the epoch.
    """

    shards: NDArray[np.uint32]
    starts: NDArray[np.int64]


class Order:
    """Finds the segments of any window, and the windows of any document.

    index_of: the length index of a shard by its number; who reads in this order uses the same. indices_of: the same of
    several shards, where they come sooner together than one by one. Safe to use from several threads, as these must be.
    """

    def __init__(
        self,
        split: HasShardTokens,
        seed: int,
        seq_len: int,
        shuffle_block_shards: int,
        index_of: Callable[[int], ShardIndex],
        indices_of: Callable[[Sequence[int]], Sequence[ShardIndex]] | None = None,
    ) -> None:
        self._shard_tokens = split.shard_tokens
        assert len(self._shard_tokens) > 0 and self._shard_tokens.min() > 0 and seq_len > 0 and shuffle_block_shards > 0
        self.seed, self.seq_len, self.shuffle_block_shards = seed, seq_len, shuffle_block_shards
        self.epoch_tokens = int(self._shard_tokens.sum())
        self.index_of = index_of
        self._indices_of = indices_of or (lambda shards: [index_of(shard) for shard in shards])
        self._epochs = Recent[_Epoch](OPEN_EPOCHS)
        self._blocks = Recent[Block](OPEN_BLOCKS)

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
            count = min(stop, block_start + block.num_tokens) - start
            parts.append(block.cut(start - block_start, start - block_start + count))
            start += count
        return joined(parts)

    def between_many(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[SegmentColumns, NDArray[np.int64]]:
        """What `between` gives for each of several ranges, one after the other, and each segment's range; int64 [n],
        each start < its stop.

        Ranges that follow each other in one block are cut together, which makes many of them cheap.
        """
        assert len(starts) == len(stops) and (starts < stops).all()
        parts, ranges, done = [], [np.zeros(0, np.int64)], 0
        while done < len(starts):
            epoch, number, block_start = self._block_at(int(starts[done]))
            block = self._block(epoch, number)
            begins, ends = starts[done:] - block_start, stops[done:] - block_start
            outside = np.flatnonzero((begins < 0) | (ends > block.num_tokens))
            count = int(outside[0]) if len(outside) else len(begins)
            if count:
                part, range_of = block.cut_many(begins[:count], ends[:count])
            else:
                count, part = 1, self.between(int(starts[done]), int(stops[done]))
                range_of = np.zeros(len(part.length), np.int64)
            parts.append(part)
            ranges.append(range_of + done)
            done += count
        return joined(parts), np.concatenate(ranges)

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
        number, _ = self._slot_of(epoch, shard)
        first, last = self._epoch(epoch).starts[number : number + 2] + epoch * self.epoch_tokens
        return int(first) // self.seq_len, (int(last) - 1) // self.seq_len + 1

    def epoch_of(self, position: int) -> int:
        """Epoch of the window's first token."""
        return position * self.seq_len // self.epoch_tokens

    def epoch_of_last(self, position: int) -> int:
        """Epoch of the window's last token."""
        return ((position + 1) * self.seq_len - 1) // self.epoch_tokens

    def _holding(self, epoch: int, shard: int) -> tuple[Block, int, int]:
        """The block that has `shard` in `epoch`, the block's first token in the stream, the shard's first document in
        the block.
        """
        number, slot = self._slot_of(epoch, shard)
        block = self._block(epoch, number)
        block_start = epoch * self.epoch_tokens + int(self._epoch(epoch).starts[number])
        return block, block_start, int(block.first_of_slot[slot])

    def _slot_of(self, epoch: int, shard: int) -> tuple[int, int]:
        """The block that has a shard in an epoch, and the shard's place in the block."""
        return divmod(int(np.flatnonzero(self._epoch(epoch).shards == shard)[0]), self.shuffle_block_shards)

    def _block_at(self, token: int) -> tuple[int, int, int]:
        """Epoch and block number that hold a token of the stream, and the block's first token."""
        assert token >= 0
        epoch, within = divmod(token, self.epoch_tokens)
        starts = self._epoch(epoch).starts
        number = int(np.searchsorted(starts, within, side="right")) - 1
        return epoch, number, epoch * self.epoch_tokens + int(starts[number])

    def _epoch(self, epoch: int) -> _Epoch:
        return self._epochs.get(epoch, lambda: self._permute_shards(epoch))

    def _block(self, epoch: int, number: int) -> Block:
        return self._blocks.get((epoch, number), lambda: self._permute_documents(epoch, number))

    def _permute_shards(self, epoch: int) -> _Epoch:
        key = key_of("stream.order.shards", self.seed, epoch)
        shards = permutation(len(self._shard_tokens), key, np.uint32)
        return _Epoch(shards, running_sum(_block_tokens(self._shard_tokens, shards, self.shuffle_block_shards)))

    def _permute_documents(self, epoch: int, number: int) -> Block:
        first = number * self.shuffle_block_shards
        shards = self._epoch(epoch).shards[first : first + self.shuffle_block_shards].astype(np.int64)
        indices = self._indices_of(shards.tolist())
        return make_block(shards, indices, key_of("stream.order.documents", self.seed, epoch, number))


def _block_tokens(
    shard_tokens: NDArray[np.int64], shards: NDArray[np.uint32], shuffle_block_shards: int
) -> NDArray[np.int64]:
    """Tokens of each run of `shuffle_block_shards` of the permuted shards, int64 [num_blocks]."""
    totals = np.empty(-(-len(shards) // shuffle_block_shards), np.int64)
    blocks_at_once = max(1, _SHARDS_AT_ONCE // shuffle_block_shards)
    for first in range(0, len(totals), blocks_at_once):
        part = shards[first * shuffle_block_shards : (first + blocks_at_once) * shuffle_block_shards]
        begins = np.arange(0, len(part), shuffle_block_shards)
        np.add.reduceat(shard_tokens.take(part), begins, out=totals[first : first + blocks_at_once])
    return totals
