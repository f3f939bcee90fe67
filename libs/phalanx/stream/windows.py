"""Windows as a model takes them: tokens, shifted targets, positions and document numbers, with the rows that record
what was read.

Under `document_mask` documents are kept apart: a target that would cross a document is IGNORED_TARGET, positions
restart at 0 at each document (and at each window, where a document goes on from the window before: attention does not
reach back there), and `document_ids` count the documents within a window. Without it a window is one run of tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.objects import ObjectStore
from phalanx.stream.batch import SURPLUS
from phalanx.stream.manifest import Split
from phalanx.stream.members import DEFAULT_CACHE_BYTES, DamagedShard, MemberCache, Tokens
from phalanx.stream.order import NO_SEGMENTS, Order, SegmentColumns
from phalanx.stream.spans import as_array, hold, holds, merged

IGNORED_TARGET = -100
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ReadRows:
    """Record columns of the windows read, surplus slots left out; n windows, m segments.

    position int64 [n]; weight float32 [n]: 1, or 0 where the journal takes the window out; xxh3 uint64 [n]: XXH3-64
    over the window's input tokens as little-endian uint32, as the model received them. segment_window int64 [m]: row of
    the segment's window; shard, member, offset (tokens inside the member), length (tokens): int64 [m]. A window of
    weight 0 lists the segments it stands for, though their bytes were not read; none where the index that would tell
    them is damaged.
    """

    position: NDArray[np.int64]
    weight: NDArray[np.float32]
    xxh3: NDArray[np.uint64]
    segment_window: NDArray[np.int64]
    shard: NDArray[np.int64]
    member: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class WindowBatch:
    """tokens, targets, position_ids, document_ids: int64 [n, seq_len], one row for each position asked; rows: what to
    record.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    document_ids: NDArray[np.int64]
    rows: ReadRows


class WindowReader:
    """Reads windows of `split` in the given order.

    zero_weight: ranges [start, stop) of window positions that the journal takes out of training (skipped or damaged):
    not a byte of them is read, they hold token 0 and no target, and count no valid token. The last target of the window
    before one of them, which would be its first token, does not count either. cache_bytes bounds the members
    kept, and a warning is logged where a block may hold more; deadline_s bounds one read. Use it in the process that
    made it; `close` ends its threads.
    """

    def __init__(
        self,
        store: ObjectStore,
        split: Split,
        order: Order,
        document_mask: bool,
        *,
        zero_weight: Sequence[tuple[int, int]] = (),
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        num_threads: int = 4,
        deadline_s: float = 120,
    ) -> None:
        self._order, self._document_mask = order, document_mask
        self.set_zero_weight(zero_weight)
        self._members = MemberCache(store, split, order.index_of, cache_bytes, num_threads, deadline_s)
        _warn_of_large_blocks(split, order.shuffle_block_shards, cache_bytes)

    def set_zero_weight(self, spans: Sequence[tuple[int, int]]) -> None:
        """Takes other ranges out of training from now on: the journal has changed."""
        self._zero_weight = merged(as_array(spans))
        self._without_segments = as_array(())

    def close(self) -> None:
        """Ends the threads that fetch ahead."""
        self._members.close()

    def __enter__(self) -> WindowReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prefetch(self, positions: NDArray[np.int64]) -> None:
        """Starts to fetch what these windows need (any shape, -1 ignored), as far as the cache holds it; raises only
        what the indices raise.
        """
        windows = (self._order.between(*self._tokens_read(p)) for p in self._read_positions(positions))
        self._members.ahead(member for window in windows for member in _members_of(window))

    def read(self, positions: NDArray[np.int64]) -> WindowBatch:
        """The windows at `positions`, int64 [n]; -1 is a surplus slot: token 0, no target, no row.

        Raises DamagedShard for bytes that are wrong twice, OutsideError where the store fails or the deadline passes.
        """
        assert positions.ndim == 1
        self.prefetch(positions)
        shape = len(positions), self._order.seq_len
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED_TARGET, np.int64)
        position_ids, document_ids = np.tile(np.arange(shape[1]), (shape[0], 1)), np.zeros(shape, np.int64)
        rows = _Rows()
        for row, position in enumerate(positions.tolist()):
            if position == SURPLUS:
                continue
            if self._is_zero_weight(position):
                rows.add(position, 0.0, tokens[row], self._segments_left_out(position))
                continue
            segments = self._order.window(position)
            tokens[row], targets[row] = self._tokens_and_targets(position, segments)
            if self._document_mask:
                position_ids[row], document_ids[row] = _document_positions(segments.length)
            rows.add(position, 1.0, tokens[row], segments)
        return WindowBatch(tokens, targets, position_ids, document_ids, rows.columns())

    def valid_targets(self, positions: NDArray[np.int64]) -> int:
        """Targets that count in the windows at `positions` (any shape, -1 ignored), from the order alone: no token is
        read.
        """
        counted = np.array(sorted(self._read_positions(positions)), dtype=np.int64)
        if not len(counted):
            return 0
        order, seq_len = self._order, self._order.seq_len
        cut = counted[hold(self._zero_weight, counted + 1)]
        if not self._document_mask:
            return len(counted) * seq_len - len(cut)
        runs = np.split(counted, np.flatnonzero(np.diff(counted) != 1) + 1)
        ends = sum(order.count_document_ends(int(run[0]) * seq_len, (int(run[-1]) + 1) * seq_len) for run in runs)
        # Where the window itself ends with a document, its last target is among these ends already.
        last_tokens = [(int(position) + 1) * seq_len - 1 for position in cut]
        cut_inside = sum(1 - order.count_document_ends(last, last + 1) for last in last_tokens)
        return len(counted) * seq_len - ends - cut_inside

    def _read_positions(self, positions: NDArray[np.int64]) -> list[int]:
        """Those of `positions` whose tokens are read: neither surplus nor of weight 0."""
        return [p for p in positions.ravel().tolist() if p != SURPLUS and not self._is_zero_weight(p)]

    def _is_zero_weight(self, position: int) -> bool:
        return holds(self._zero_weight, position)

    def _tokens_read(self, position: int) -> tuple[int, int]:
        """The tokens of the stream, half-open, that a window needs: its own, and the first of the next unless that one
        is taken out.
        """
        start = position * self._order.seq_len
        stop = start + self._order.seq_len
        return start, stop if self._is_zero_weight(position + 1) else stop + 1

    def _segments_left_out(self, position: int) -> SegmentColumns:
        """The segments of a window that is taken out, or none in a block whose indices can't all be read."""
        if holds(self._without_segments, position):
            return NO_SEGMENTS
        try:
            return self._order.window(position)
        except DamagedShard as damage:
            _LOG.warning("windows without weight are recorded without their segments: %s", damage)
            epochs = range(self._order.epoch_of(position), self._order.epoch_of_last(position) + 1)
            blocks = as_array([self._order.span_of_block(epoch, damage.shard) for epoch in epochs])
            self._without_segments = merged(np.concatenate([self._without_segments, blocks]))
            return NO_SEGMENTS

    def _tokens_and_targets(
        self, position: int, segments: SegmentColumns
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets of one window, int64 [seq_len] each."""
        seq_len = self._order.seq_len
        tokens = self._gather(segments)
        targets = np.full(seq_len, IGNORED_TARGET, np.int64)
        targets[:-1] = tokens[1:]
        is_cut = self._is_zero_weight(position + 1)
        if not (is_cut or (self._document_mask and segments.ends_document[-1])):
            after = (position + 1) * seq_len
            targets[-1] = self._gather(self._order.between(after, after + 1))[0]
        if self._document_mask:
            last_inputs = np.cumsum(segments.length) - 1
            targets[last_inputs[segments.ends_document]] = IGNORED_TARGET
        return tokens, targets

    def _gather(self, segments: SegmentColumns) -> NDArray[np.int64]:
        members = self._members.get(_members_of(segments))
        places = zip(
            segments.shard.tolist(),
            segments.member.tolist(),
            segments.offset.tolist(),
            segments.length.tolist(),
            strict=True,
        )
        return np.concatenate([members[s, m][offset : offset + length] for s, m, offset, length in places]).astype(
            np.int64
        )


def _warn_of_large_blocks(split: Split, shuffle_block_shards: int, cache_bytes: int) -> None:
    largest_tokens = int(np.sort(split.shard_tokens)[-shuffle_block_shards:].sum())
    if largest_tokens * split.dtype.itemsize > cache_bytes:
        _LOG.warning(
            "%s: a block of %d shards may hold %d bytes of tokens, the cache %d: members will be fetched more than "
            "once; lower data.shuffle_block_shards",
            split.url,
            shuffle_block_shards,
            largest_tokens * split.dtype.itemsize,
            cache_bytes,
        )


class _Rows:
    """Collects ReadRows window by window."""

    def __init__(self) -> None:
        self._windows: list[tuple[int, float, int]] = []
        self._segments: list[SegmentColumns] = []

    def add(self, position: int, weight: float, tokens: NDArray[np.int64], segments: SegmentColumns) -> None:
        self._windows.append((position, weight, tokens_xxh3(tokens)))
        self._segments.append(segments)

    def columns(self) -> ReadRows:
        def segment_column(name: str) -> NDArray[np.int64]:
            empty = [np.zeros(0, np.int64)]
            return np.concatenate(empty + [getattr(segments, name) for segments in self._segments])

        counts = np.array([len(segments.length) for segments in self._segments], dtype=np.int64)
        return ReadRows(
            position=np.array([position for position, _, _ in self._windows], dtype=np.int64),
            weight=np.array([weight for _, weight, _ in self._windows], dtype=np.float32),
            xxh3=np.array([digest for _, _, digest in self._windows], dtype=np.uint64),
            segment_window=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
            shard=segment_column("shard"),
            member=segment_column("member"),
            offset=segment_column("offset"),
            length=segment_column("length"),
        )


def tokens_xxh3(tokens: NDArray[np.integer] | Tokens) -> int:
    """The digest that a step record keeps of a window: XXH3-64 over its tokens as little-endian uint32."""
    return int(xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, dtype="<u4").tobytes()))


def _members_of(segments: SegmentColumns) -> Iterable[tuple[int, int]]:
    return zip(segments.shard.tolist(), segments.member.tolist(), strict=True)


def _document_positions(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions that restart with each segment, and the number of each segment, for every token; int64 [sum of lengths]
    each.
    """
    document_ids = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    starts = np.cumsum(lengths) - lengths
    return np.arange(len(document_ids), dtype=np.int64) - starts[document_ids], document_ids
