"""The pieces that a reader has in memory: fetched by a few threads, kept up to a bound in bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import OutsideError
from phalanx.stream.members import DamagedShard
from phalanx.stream.pieces import PLACE_BITS, Piece, SplitPieces, Tokens
from phalanx.stream.segments import SegmentColumns

_NUMBER_MASK = (1 << PLACE_BITS) - 1
_FORKED = "a reader made before a fork must not be used after it"
_Key: TypeAlias = tuple[int, int]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Kept:
    """A piece kept or being fetched. used: the reading that needed it last; piece: once somebody has waited for it."""

    loading: Future[Piece]
    num_bytes: int
    used: int
    piece: Piece | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Segments of a source and where their tokens lie: places int64 [num_segments] as in `SplitPieces.places`; runs
    join the segments that go on in the next: place, first byte in the piece, and the byte behind the last.
    """

    source: int
    segments: SegmentColumns
    places: NDArray[np.int64]
    run_places: list[int]
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
        places, begins = self._sources[source].places(segments)
        ends = begins + segments.length * self._sources[source].dtype.itemsize
        is_new = np.ones(len(places), bool)
        is_new[1:] = (places[1:] != places[:-1]) | (begins[1:] != ends[:-1])
        is_last = np.append(is_new[1:], True)
        runs = places[is_new].tolist(), begins[is_new].tolist(), ends[is_last].tolist()
        return Located(source, segments, places, *runs)

    def start(self, located: Located, budget_bytes: int) -> int:
        """Starts to fetch what is located, in its order, while `budget_bytes` of pieces are not used up; gives what is
        left of them, 0 where they ran out.
        """
        for place in dict.fromkeys(located.run_places):
            kept = self._kept.get((located.source, place))
            budget_bytes -= self._num_bytes(located.source, place) if kept is None else kept.num_bytes
            if budget_bytes < 0:
                return 0
            if kept is None:
                self._start(located.source, place)
            else:
                kept.used = self._reading
        return budget_bytes

    def gather(self, located: Located) -> Tokens:
        """The tokens of segments, one after the other, in memory of their own; raises DamagedShard, the store's error,
        or OutsideError at the deadline.
        """
        assert os.getpid() == self._pid, _FORKED
        self._reading += 1
        data = {}
        for place in dict.fromkeys(located.run_places):
            piece = self._opened(located.source, place)
            if piece.damage:
                self._require(located, place, piece)
            data[place] = piece.data
        runs = zip(located.run_places, located.run_begins, located.run_ends, strict=True)
        # Joining views is faster than np.concatenate, which costs a microsecond for each of its arrays.
        joined = bytearray().join([data[place][begin:end] for place, begin, end in runs])
        return np.frombuffer(joined, self._sources[located.source].dtype)

    def _require(self, located: Located, place: int, piece: Piece) -> None:
        """Raises DamagedShard where a member that is needed is damaged; its piece is not kept, so who asks again may
        find it mended.
        """
        try:
            piece.require(located.segments.member[located.places == place].tolist())
        except DamagedShard:
            with self._lock:
                if (kept := self._kept.get((located.source, place))) is not None and kept.piece is piece:
                    self._let_go((located.source, place))
            raise

    def _num_bytes(self, source: int, place: int) -> int:
        return self._sources[source].cut(place >> PLACE_BITS).span(place & _NUMBER_MASK)[1]

    def _opened(self, source: int, place: int) -> Piece:
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

    def _start(self, source: int, place: int) -> _Kept:
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
            loading = self._threads.submit(self._sources[source].load, place >> PLACE_BITS, place & _NUMBER_MASK)
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
