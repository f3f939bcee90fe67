"""The members that a reader has in memory: fetched in pieces by a few threads, kept up to a bound in bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from phalanx.core.errors import OutsideError
from phalanx.stream.members import DamagedShard
from phalanx.stream.pieces import SplitPieces, Tokens
from phalanx.stream.segments import SegmentColumns

_MEMBER_BITS = 32
_MEMBER_MASK = (1 << _MEMBER_BITS) - 1

Loaded: TypeAlias = list[Tokens | DamagedShard]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Piece:
    """A piece kept or being fetched. used: the reading that needed it last; members: keys of those that are open."""

    source: int
    loaded: Future[Loaded]
    num_bytes: int
    used: int
    members: list[int] = field(default_factory=list)


class MemberCache:
    """Token arrays of members by source, shard and member.

    A member in use stays alive through the array that its reader holds, so letting it go never races a reader; a single
    piece larger than the bound is still served, and kept alone. One thread reads, any may ask for what comes. Not to be
    used in a child of the process that made it; `close` ends its threads.
    """

    def __init__(self, sources: Sequence[SplitPieces], cache_bytes: int, num_threads: int, deadline_s: float) -> None:
        assert cache_bytes > 0 and num_threads > 0
        self._sources, self._cache_bytes, self._deadline_s = tuple(sources), cache_bytes, deadline_s
        self._pieces: dict[tuple[int, int, int], _Piece] = {}
        self._open: tuple[dict[int, tuple[Tokens, _Piece]], ...] = tuple({} for _ in sources)
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

    def ahead(self, source: int, segments: SegmentColumns, budget_bytes: int) -> int:
        """Starts to fetch what segments need, in their order, while `budget_bytes` of pieces are not used up; gives
        what is left of them, 0 where they ran out. Raises what the indices raise.
        """
        seen = set[tuple[int, int]]()
        for shard, member in _in_order(segments):
            cuts = self._sources[source].cut(shard)
            piece = shard, int(cuts.piece_of[member])
            if piece in seen:
                continue
            seen.add(piece)
            budget_bytes -= cuts.span(piece[1])[1]
            if budget_bytes < 0:
                return 0
            self._start(source, *piece)
        return budget_bytes

    def want(self, source: int, segments: SegmentColumns) -> None:
        """As `ahead`, for the few segments that are read next, within the bound; of members not yet open only."""
        known, budget_bytes, seen = self._open[source], self._cache_bytes, set[tuple[int, int]]()
        for key in dict.fromkeys(_keys(segments)):
            if key in known or (place := self._place(source, key)) in seen:
                continue
            seen.add(place)
            budget_bytes -= self._start(source, *place).num_bytes
            if budget_bytes < 0:
                return

    def gather(self, source: int, segments: SegmentColumns) -> Tokens:
        """The tokens of segments, one after the other; raises DamagedShard, the store's error, or OutsideError at the
        deadline.
        """
        self._reading = reading = self._reading + 1
        known, (keys, begins, ends) = self._open[source], _runs(segments)
        try:
            parts = [known[key][0][begin:end] for key, begin, end in zip(keys, begins, ends, strict=True)]
        except KeyError:  # some are still to be waited for, or were let go meanwhile
            found = ((known.get(key) or self._opened(source, key))[0] for key in keys)
            parts = [tokens[begin:end] for tokens, begin, end in zip(found, begins, ends, strict=True)]
        for key in set(keys):
            if (kept := known.get(key)) is not None:
                kept[1].used = reading
        return np.concatenate(parts)

    def _place(self, source: int, key: int) -> tuple[int, int]:
        """Shard and piece of a member."""
        shard = key >> _MEMBER_BITS
        return shard, int(self._sources[source].cut(shard).piece_of[key & _MEMBER_MASK])

    def _opened(self, source: int, key: int) -> tuple[Tokens, _Piece]:
        """A member, waited for; all of its piece is open then, as long as the piece is kept."""
        shard, number = self._place(source, key)
        piece = self._start(source, shard, number)
        try:
            loaded = piece.loaded.result(self._deadline_s)
        except FutureTimeout as error:
            url = self._sources[source].url
            raise OutsideError(f"reading {url} took longer than {self._deadline_s:g} s") from error
        first = self._sources[source].cut(shard).members(number)[0]
        tokens = loaded[(key & _MEMBER_MASK) - first]
        if isinstance(tokens, DamagedShard):
            self._forget((source, shard, number), piece)
            raise tokens
        with self._lock:
            if self._pieces.get((source, shard, number)) is piece and not piece.members:
                whole = {
                    shard << _MEMBER_BITS | (first + k): found
                    for k, found in enumerate(loaded)
                    if not isinstance(found, DamagedShard)
                }
                piece.members = list(whole)
                self._open[source].update((key, (found, piece)) for key, found in whole.items())
        return tokens, piece

    def _start(self, source: int, shard: int, number: int) -> _Piece:
        """The piece, kept or asked for, and marked as used now."""
        assert os.getpid() == self._pid, "a reader made before a fork must not be used after it"
        key = source, shard, number
        with self._lock:
            if (kept := self._pieces.get(key)) is not None:
                kept.used = self._reading
                return kept
        num_bytes = self._sources[source].cut(shard).span(number)[1]
        with self._lock:
            if (kept := self._pieces.get(key)) is not None:
                return kept
            loaded = self._threads.submit(self._sources[source].load, shard, number)
            piece = self._pieces[key] = _Piece(source, loaded, num_bytes, self._reading)
            self._kept_bytes += num_bytes
            while self._kept_bytes > self._cache_bytes and len(self._pieces) > 1:
                others = (other for other in self._pieces if other != key)
                self._let_go(min(others, key=lambda other: self._pieces[other].used))
        loaded.add_done_callback(lambda done: self._forget_failed(key, done))
        return piece

    def _let_go(self, key: tuple[int, int, int]) -> None:
        """Drops a piece; the caller holds the lock."""
        piece = self._pieces.pop(key)
        self._kept_bytes -= piece.num_bytes
        for member in piece.members:
            del self._open[piece.source][member]

    def _forget_failed(self, key: tuple[int, int, int], done: Future[Loaded]) -> None:
        """A failure is told to those who wait for it, and not kept for those who ask later."""
        if not done.cancelled() and done.exception() is None:
            return
        with self._lock:
            # Found by its key: a callback that held the piece would keep it alive until the garbage is collected.
            if (piece := self._pieces.get(key)) is not None and piece.loaded is done:
                self._let_go(key)

    def _forget(self, key: tuple[int, int, int], piece: _Piece) -> None:
        with self._lock:
            if self._pieces.get(key) is piece:
                self._let_go(key)


def _keys(segments: SegmentColumns) -> list[int]:
    """The member of each segment as one number."""
    keys: list[int] = (segments.shard << _MEMBER_BITS | segments.member).tolist()
    return keys


def _runs(segments: SegmentColumns) -> tuple[list[int], list[int], list[int]]:
    """Segments joined where one goes on in the next: member, first token in it, and the token behind the last."""
    keys, begins = segments.shard << _MEMBER_BITS | segments.member, segments.offset
    ends = begins + segments.length
    is_new = np.ones(len(keys), bool)
    is_new[1:] = (keys[1:] != keys[:-1]) | (begins[1:] != ends[:-1])
    is_last = np.append(is_new[1:], True)
    return keys[is_new].tolist(), begins[is_new].tolist(), ends[is_last].tolist()


def _in_order(segments: SegmentColumns) -> Iterable[tuple[int, int]]:
    """Shard and number of each member that segments need, each once, in the order in which they need them."""
    keys = segments.shard << _MEMBER_BITS | segments.member
    _, firsts = np.unique(keys, return_index=True)
    return [(key >> _MEMBER_BITS, key & _MEMBER_MASK) for key in keys[np.sort(firsts)].tolist()]
