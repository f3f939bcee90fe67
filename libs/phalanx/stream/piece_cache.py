"""The pieces that a reader has in memory: fetched by a few threads, kept up to a bound in bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import OutsideError
from phalanx.stream.members import DamagedShard
from phalanx.stream.pieces import Piece, Place, SplitPieces, Tokens
from phalanx.stream.segments import SegmentColumns

_FORKED = "a reader made before a fork must not be used after it"
_Key: TypeAlias = tuple[int, Place]
_NOTHING = memoryview(b"")
_VIEWS_AT_ONCE = 256


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Kept:
    """A piece kept or being fetched. used: the reading that needed it last; piece: once somebody has waited for it."""

    loading: Future[Piece]
    num_bytes: int
    used: int
    piece: Piece | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Segments of a source and where their tokens lie: pieces, and piece_of int64 [num_segments], as in
    `SplitPieces.places`; needed: the numbers of those that are needed, in the order of need. Runs join the segments
    that go on in the next: number of the piece, first byte in it, and the byte behind the last.
    """

    source: int
    segments: SegmentColumns
    pieces: Sequence[Place]
    piece_of: NDArray[np.int64]
    needed: list[int]
    run_pieces: list[int]
    run_begins: list[int]
    run_ends: list[int]


class PieceCache:
    """Pieces by source and place (see `SplitPieces.places`), and the tokens of segments out of them.

    A piece in use stays alive through the view that its reader holds, so letting it go never races a reader; a single
    piece larger than the bound is still served, and kept alone. One thread reads, any may ask for what comes. Not to be
    used in a child of the process that made it; `close` ends its threads.
    """

    def __init__(self, sources: Sequence[SplitPieces], cache_bytes: int, num_threads: int, deadline_s: float) -> None:
        assert cache_bytes > 0 and num_threads > 0
        self._sources, self._cache_bytes, self._deadline_s = tuple(sources), cache_bytes, deadline_s
        self._kept: dict[_Key, _Kept] = {}
        self._kept_bytes, self._reading = 0, 0
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="phalanx-stream")

    def close(self) -> None:
        """Ends the threads; what they are fetching is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the pieces held or being fetched."""
        return self._kept_bytes

    @property
    def cache_bytes(self) -> int:
        """The bound."""
        return self._cache_bytes

    def locate(self, source: int, segments: SegmentColumns) -> Located:
        """Where the tokens of segments lie; raises what the indices raise."""
        pieces, piece_of, begins = self._sources[source].places(segments)
        ends = begins + segments.length * self._sources[source].dtype.itemsize
        is_edge = np.ones(len(piece_of) + 1, bool)
        is_edge[1:-1] = (piece_of[1:] != piece_of[:-1]) | (begins[1:] != ends[:-1])
        starts, stops = is_edge[:-1], is_edge[1:]
        runs = piece_of[starts].tolist(), begins[starts].tolist(), ends[stops].tolist()
        return Located(source, segments, pieces, piece_of, _by_first_use(piece_of, len(pieces)), *runs)

    def start(self, located: Located) -> None:
        """Starts to fetch what is located, in the order of need, as far as the bound holds it."""
        self._start_all(located.source, [located.pieces[number] for number in located.needed], self._cache_bytes)

    def start_segments(self, source: int, segments: SegmentColumns, budget_bytes: int) -> int:
        """Starts to fetch what segments need, in the order of need, while `budget_bytes` of pieces are not used up;
        gives what is left of them, 0 where they ran out. Raises what the indices raise.
        """
        pieces, piece_of, _ = self._sources[source].places(segments)
        needed = _by_first_use(piece_of, len(pieces))
        return self._start_all(source, [pieces[number] for number in needed], budget_bytes)

    def _start_all(self, source: int, places: Iterable[Place], budget_bytes: int) -> int:
        for place in places:
            kept = self._kept.get((source, place))
            budget_bytes -= self._num_bytes(source, place) if kept is None else kept.num_bytes
            if budget_bytes < 0:
                return 0
            if kept is None:
                self._start(source, place)
            else:
                kept.used = self._reading
        return budget_bytes

    def gather(self, located: Located) -> Tokens:
        """The tokens of segments, one after the other, in memory of their own; raises DamagedShard, the store's error,
        or OutsideError at the deadline.
        """
        assert os.getpid() == self._pid, _FORKED
        self._reading += 1
        data = [_NOTHING] * len(located.pieces)
        for number in located.needed:
            piece = self._opened(located.source, located.pieces[number])
            if piece.damage:
                self._require(located, number, piece)
            data[number] = piece.data
        return np.frombuffer(_joined(data, located), self._sources[located.source].dtype)

    def _require(self, located: Located, number: int, piece: Piece) -> None:
        """Raises DamagedShard where a member that is needed is damaged; its piece is not kept, so who asks again may
        find it mended.
        """
        try:
            piece.require(located.segments.member[located.piece_of == number].tolist())
        except DamagedShard:
            key = located.source, located.pieces[number]
            with self._lock:
                if (kept := self._kept.get(key)) is not None and kept.piece is piece:
                    self._let_go(key)
            raise

    def _num_bytes(self, source: int, place: Place) -> int:
        shard, number = place
        return self._sources[source].cut(shard).span(number)[1]

    def _opened(self, source: int, place: Place) -> Piece:
        """A piece, waited for, and marked as used now."""
        kept = self._kept.get((source, place)) or self._start(source, place)
        kept.used = self._reading
        if kept.piece is None:
            try:
                kept.piece = kept.loading.result(self._deadline_s)
            except FutureTimeout as error:
                url = self._sources[source].url
                raise OutsideError(f"reading {url} took longer than {self._deadline_s:g} s") from error
        return kept.piece

    def _start(self, source: int, place: Place) -> _Kept:
        """A piece, kept or asked for, and marked as used now."""
        assert os.getpid() == self._pid, _FORKED
        key = source, place
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                kept.used = self._reading
                return kept
        num_bytes = self._num_bytes(source, place)
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                return kept
            loading = self._threads.submit(self._sources[source].load, *place)
            kept = self._kept[key] = _Kept(loading, num_bytes, self._reading)
            self._kept_bytes += num_bytes
            while self._kept_bytes > self._cache_bytes and len(self._kept) > 1:
                others = (other for other in self._kept if other != key)
                self._let_go(min(others, key=lambda other: self._kept[other].used))
        loading.add_done_callback(lambda done: self._forget_failed(key, done))
        return kept

    def _let_go(self, key: _Key) -> None:
        """Drops a piece; the caller holds the lock."""
        self._kept_bytes -= self._kept.pop(key).num_bytes

    def _forget_failed(self, key: _Key, done: Future[Piece]) -> None:
        """A failure is told to those who wait for it, and not kept for those who ask later."""
        if not done.cancelled() and done.exception() is None:
            return
        with self._lock:
            # Found by its key: a callback that held the piece would keep it alive until the garbage is collected.
            if (kept := self._kept.get(key)) is not None and kept.loading is done:
                self._let_go(key)


def _joined(data: Sequence[memoryview], located: Located) -> bytearray:
    """The bytes of all runs out of the pieces' `data`.

    Joining views is faster than np.concatenate, which costs a microsecond for each of its arrays. They are joined in
    parts: the garbage collector tracks views, and would look through the process whenever a group of windows has more
    of them at once than its threshold of 700; a part that is copied twice is still in the core's cache.
    """
    runs = zip(located.run_pieces, located.run_begins, located.run_ends, strict=True)
    num_parts = -(-len(located.run_pieces) // _VIEWS_AT_ONCE)
    return bytearray().join(
        [
            b"".join([data[number][begin:end] for number, begin, end in islice(runs, _VIEWS_AT_ONCE)])
            for _ in range(num_parts)
        ]
    )


def _by_first_use(numbers: NDArray[np.int64], count: int) -> list[int]:
    """Those of range(count) that are among `numbers`, in the order in which they first occur."""
    first = np.full(count, len(numbers))
    first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)  # of equal ones the last that is written stays
    order = np.argsort(first, kind="stable")
    needed: list[int] = order[: np.count_nonzero(first < len(numbers))].tolist()
    return needed
