"""Windows in the order of a job: packed, with the rows that record what was read.

Under `document_mask` documents are kept apart: a target that would cross a document does not count, positions restart
at 0 at each document (and at each window, where a document goes on from the window before: attention does not reach
back there), and document numbers count the documents within a window. Without it a window is one run of tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import OutsideError
from phalanx.objects import ObjectStore
from phalanx.stream.ahead import BlockAhead
from phalanx.stream.batch import SURPLUS
from phalanx.stream.cuts import NO_PLACES, WindowCut, cut_windows
from phalanx.stream.manifest import Split
from phalanx.stream.members import DamagedShard
from phalanx.stream.node_cache import NodeCache
from phalanx.stream.order import Order
from phalanx.stream.packed import IGNORED_TARGET, PackedWindows
from phalanx.stream.piece_cache import Located, PieceCache
from phalanx.stream.piece_memory import PieceMemory
from phalanx.stream.pieces import PIECE_BYTES, SplitPieces, block_bytes
from phalanx.stream.rows import ReadRows, SlotSegments, digests_of, rows_of, tokens_xxh3
from phalanx.stream.segments import NO_SEGMENTS, SegmentColumns
from phalanx.stream.sources import Source
from phalanx.stream.spans import as_array, holds, merged
from phalanx.stream.view import View

__all__ = ["DEFAULT_CACHE_BYTES", "IGNORED_TARGET", "ReadRows", "WindowBatch", "WindowReader", "tokens_xxh3"]

DEFAULT_CACHE_BYTES = 256 << 20
GROUP_TOKENS = 1 << 19
_PIECES_AT_LEAST = 16  # that the bound holds, so that letting one go frees a small part of it
_LOG = logging.getLogger(__name__)

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class WindowBatch:
    """One row for each position asked; rows: what to record. The int64 forms, [n, seq_len] each, are made anew whenever
    they are asked for.
    """

    packed: PackedWindows
    rows: ReadRows

    @property
    def tokens(self) -> Int64:
        """Inputs."""
        return self.packed.inputs()

    @property
    def targets(self) -> Int64:
        """Each input's successor, IGNORED_TARGET where it does not count."""
        return self.packed.targets()

    @property
    def position_ids(self) -> Int64:
        """Positions, from 0 at each document."""
        return self.packed.position_ids()

    @property
    def document_ids(self) -> Int64:
        """Number of the document within the window."""
        return self.packed.document_ids()


class ReaderOptions(TypedDict, total=False):
    """See MixtureReader."""

    cache_bytes: int
    cache: NodeCache | None
    num_threads: int
    deadline_s: float
    reads_ahead: bool


class MixtureReader:
    """Reads windows of several sources, which lie where `view` says.

    Windows that it takes out of training (skipped or damaged) are not looked at, they hold token 0 and no target, and
    count no valid token. The last target of the window before one of them on its source's stream, which would be its
    first token, does not count either.
    cache_bytes bounds the members in memory, and a warning is logged where a block may hold more; cache: where those of
    remote splits are kept for all ranks of a node; deadline_s bounds one wait. reads_ahead: whether the rest of a block
    and the next one are fetched before they are asked for, which serves those who read on and on. Use it in the process
    that made it; `close` ends its threads.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        view: View,
        document_mask: bool,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        cache: NodeCache | None = None,
        num_threads: int = 8,
        deadline_s: float = 120,
        reads_ahead: bool = False,
    ) -> None:
        self._sources, self.document_mask = tuple(sources), document_mask
        self._seq_len = sources[0].order.seq_len
        self._dtype = max((source.split.dtype for source in sources), key=lambda dtype: dtype.itemsize)
        self.follow(view)
        piece_bytes = min(PIECE_BYTES, max(1, cache_bytes // _PIECES_AT_LEAST))
        # Two pieces that follow each other are larger than `piece_bytes`, so the bound holds at most twice as many.
        memory = PieceMemory(piece_bytes, 2 * cache_bytes // piece_bytes)
        self._pieces = PieceCache(
            [_pieces(source, piece_bytes, cache, memory) for source in sources], cache_bytes, num_threads, deadline_s
        )
        self._ahead = [self._block_ahead(number) for number in range(len(sources))] if reads_ahead else []
        _warn_of_large_blocks(sources, cache_bytes)

    def _block_ahead(self, number: int) -> BlockAhead:
        def start(segments: SegmentColumns, budget_bytes: int) -> int:
            return self._pieces.start_segments(number, segments, budget_bytes)

        budget_bytes = self._pieces.cache_bytes // len(self._sources)
        return BlockAhead(self._sources[number].order, start, budget_bytes)

    def follow(self, view: View) -> None:
        """Reads the same sources by another view from now on: the journal has changed."""
        assert len(self._sources) == view.mixture.num_sources
        self._view = view
        self._without_segments = [as_array(()) for _ in self._sources]

    def close(self) -> None:
        """Ends the threads that fetch ahead."""
        for ahead in self._ahead:
            ahead.close()
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prefetch(self, positions: Int64) -> None:
        """Starts to fetch what these windows need (any shape, -1 ignored), as far as the bound holds it; raises only
        what the indices raise.
        """
        self._start(self._cuts(positions.ravel()))

    def read(self, positions: Int64) -> WindowBatch:
        """The windows at `positions`, int64 [n]; -1 is a surplus slot: token 0, no target, no row.

        Raises DamagedShard for bytes that are wrong twice, OutsideError where the store fails or the deadline passes.
        """
        assert positions.ndim == 1
        cuts = self._cuts(positions)
        located = self._start(cuts)
        for cut in cuts if self._ahead else ():
            self._ahead[cut.source].reached(int(cut.windows[-1]))
        tokens = self._tokens(cuts, located, len(positions))
        is_row = positions != SURPLUS
        counts = self._is_read(positions)
        left_out = [self._left_out(slot, int(positions[slot])) for slot in np.flatnonzero(is_row & ~counts).tolist()]
        rows = rows_of(
            positions,
            is_row,
            counts.astype(np.float32),
            digests_of(tokens[:, :-1] if is_row.all() else tokens[is_row, :-1]),
            [*(cut.read() for cut in cuts), *left_out],
        )
        return WindowBatch(self._packed(tokens, counts, cuts), rows)

    def _start(self, cuts: Sequence[WindowCut]) -> list[Located]:
        located = [self._pieces.locate(cut.source, cut.segments) for cut in cuts]
        for each in located:
            self._pieces.start(each)
        return located

    def _tokens(
        self, cuts: Sequence[WindowCut], located: Sequence[Located], num_slots: int
    ) -> NDArray[np.unsignedinteger]:
        """[num_slots, seq_len + 1]; rows overlap where no copy was needed."""
        gathered = list(map(self._pieces.gather, located))
        rows = cuts[0].rows(gathered[0], num_slots) if len(cuts) == 1 else None
        if rows is not None:
            return rows
        tokens = np.zeros((num_slots, self._seq_len + 1), self._dtype)
        for cut, found in zip(cuts, gathered, strict=True):
            cut.place(found, tokens)
        return tokens

    def batches(self, batches: Iterable[Int64]) -> Iterator[WindowBatch]:
        """`read` of each of `batches`, several at a time, as many as GROUP_TOKENS allow: the work of a read that does
        not grow with its size is done once for all of them. The first one is read alone. Batches that can't be read
        together are read one by one, so an error comes with the batch that has it.
        """
        waiting, most = iter(batches), 1
        while group := list(islice(waiting, most)):
            try:
                yield from self._read_group(group)
            except OutsideError as error:
                if len(group) == 1:
                    raise
                _LOG.info("batches are read one by one: %s", error)
                yield from map(self.read, group)
            most = max(1, min(2 * most, GROUP_TOKENS // max(1, group[-1].size * self._seq_len)))

    def _read_group(self, group: Sequence[Int64]) -> Iterable[WindowBatch]:
        if len(group) == 1:
            return (self.read(group[0]),)
        positions = np.concatenate(group)
        edges = np.cumsum([0, *(len(batch) for batch in group)])
        row_edges = np.concatenate([NO_PLACES, [0], np.cumsum(positions != SURPLUS)])[edges]
        whole = self.read(positions)
        return map(WindowBatch, whole.packed.split(edges), whole.rows.split(row_edges))

    def _packed(
        self, tokens: NDArray[np.unsignedinteger], counts: NDArray[np.bool_], cuts: list[WindowCut]
    ) -> PackedWindows:
        seq_len = self._seq_len
        ignored = [cut.slots[cut.is_cut] * seq_len + seq_len - 1 for cut in cuts]
        if not self.document_mask:
            starts = [np.arange(len(counts), dtype=np.int64) * seq_len]
        else:
            starts = [np.flatnonzero(~counts) * seq_len]
            for cut in cuts:
                begins, ends = cut.documents()
                starts.append(begins)
                ignored.append(ends)
        return PackedWindows(
            tokens, np.sort(np.concatenate(starts)), np.sort(np.concatenate([NO_PLACES, *ignored])), counts
        )

    def valid_targets(self, positions: Int64) -> int:
        """Targets that count in the windows at `positions` (any shape, -1 ignored), from the order alone: no token is
        read.
        """
        total, seq_len = 0, self._seq_len
        for source, _, windows, is_cut in self._placed(positions.ravel()):
            order, total = self._sources[source].order, total + len(windows) * seq_len - int(is_cut.sum())
            if not self.document_mask:
                continue
            runs = np.split(windows, np.flatnonzero(np.diff(windows) != 1) + 1)
            total -= sum(order.count_document_ends(int(run[0]) * seq_len, (int(run[-1]) + 1) * seq_len) for run in runs)
            # Where the window itself ends with a document, its last target is among these ends already.
            last_tokens = ((windows[is_cut] + 1) * seq_len - 1).tolist()
            total += sum(order.count_document_ends(last, last + 1) for last in last_tokens)
        return total

    def _is_read(self, positions: Int64) -> NDArray[np.bool_]:
        """Those of `positions` whose tokens are read: neither surplus nor of weight 0."""
        is_read: NDArray[np.bool_] = positions != SURPLUS
        is_read[is_read] = ~self._view.left_out(positions[is_read])
        return is_read

    def _placed(self, positions: Int64) -> Iterator[tuple[int, Int64, Int64, NDArray[np.bool_]]]:
        """For each source the slots of `positions` that read it, its windows in these, sorted, and for each whether the
        window behind it is taken out.
        """
        slots = np.flatnonzero(self._is_read(positions))
        sources, windows = self._view.place(positions[slots])
        is_cut = self._view.next_left_out(positions[slots])
        for source in range(len(self._sources)):
            mine = np.flatnonzero(sources == source)
            if not len(mine):
                continue
            mine = mine[np.argsort(windows[mine], kind="stable")]
            yield source, slots[mine], windows[mine], is_cut[mine]

    def _cuts(self, positions: Int64) -> list[WindowCut]:
        return [
            cut_windows(self._sources[source].order, source, self._sources[source].first_shard, slots, windows, is_cut)
            for source, slots, windows, is_cut in self._placed(positions)
        ]

    def _left_out(self, slot: int, position: int) -> SlotSegments:
        """The segments of a window that is taken out, or none in a block whose indices can't all be read."""
        place, window_of = self._view.place(np.array([position]))
        number, window = int(place[0]), int(window_of[0])
        source = self._sources[number]
        segments = NO_SEGMENTS
        if not holds(self._without_segments[number], window):
            try:
                segments = source.order.window(window)
            except DamagedShard as damage:
                _LOG.warning("windows without weight are recorded without their segments: %s", damage)
                self._without_segments[number] = merged(
                    np.concatenate([self._without_segments[number], _blocks_of(source, window, damage.shard)])
                )
        return SlotSegments(segments, np.full(len(segments.length), slot, np.int64), source.first_shard)


class WindowReader(MixtureReader):
    """Reads the windows of one split in its order; see MixtureReader. zero_weight: ranges [start, stop) of windows that
    are taken out of training.
    """

    def __init__(
        self,
        store: ObjectStore,
        split: Split,
        order: Order,
        document_mask: bool,
        *,
        zero_weight: Sequence[tuple[int, int]] = (),
        **options: Unpack[ReaderOptions],
    ) -> None:
        view = View(zero_weight=zero_weight)
        super().__init__([Source(split.name, store, split, order)], view, document_mask, **options)


def _blocks_of(source: Source, window: int, shard: int) -> Int64:
    """Windows of the block that holds a shard of the source, in the epochs that `window` lies in; int64 [k, 2]."""
    order = source.order
    epochs = range(order.epoch_of(window), order.epoch_of_last(window) + 1)
    return as_array([order.span_of_block(epoch, shard - source.first_shard) for epoch in epochs])


def _pieces(source: Source, piece_bytes: int, cache: NodeCache | None, memory: PieceMemory) -> SplitPieces:
    return SplitPieces(
        source.store,
        source.split,
        source.order.index_of,
        piece_bytes=piece_bytes,
        cache=cache,
        first_shard=source.first_shard,
        memory=memory,
    )


def _warn_of_large_blocks(sources: Sequence[Source], cache_bytes: int) -> None:
    needed_bytes = sum(block_bytes(source.split, source.order.shuffle_block_shards) for source in sources)
    if needed_bytes > cache_bytes:
        _LOG.warning(
            "%s: a block of %d shards may hold %d bytes of tokens, the cache %d: members will be fetched more than "
            "once; lower data.shuffle_block_shards",
            ", ".join(source.split.url for source in sources),
            sources[0].order.shuffle_block_shards,
            needed_bytes,
            cache_bytes,
        )
