"""A shard's members in pieces: runs of adjacent members that one ranged read fetches.

A piece is what is asked of the store, kept on disk and let go together; a member is what its digest guards. Which
members make a piece follows from the shard's index and the bound alone, so all ranks of a node cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.core.errors import OutsideError
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import ShardEntry, Split, tar_key
from phalanx.stream.mapped import Bytes, map_file
from phalanx.stream.members import DamagedShard, why
from phalanx.stream.node_cache import NodeCache
from phalanx.stream.piece_memory import PieceMemory
from phalanx.stream.recent import Recent
from phalanx.stream.segments import SegmentColumns
from phalanx.stream.shards import DEFAULT_MEMBER_BYTES, MalformedShard, ShardIndex

# Four members as they are usually cut and what lies between them, so that pieces are of one size and fill a buffer.
PIECE_BYTES = 4 * DEFAULT_MEMBER_BYTES + (1 << 18)
_CUTS, _IDLE_BUFFERS = 256, 8
_WRONG_DIGEST = "its bytes do not have the digest that the index gives"
Tokens = NDArray[np.unsignedinteger]
Place: TypeAlias = tuple[int, int]  # a piece: its shard, and its number in the shard


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One shard in pieces. first_members int64 [pieces + 1]; piece_of int64 [members]; starts, num_bytes int64
    [members]: where a member's tokens lie in the tar; within int64 [members]: where in its piece.
    """

    first_members: NDArray[np.int64]
    piece_of: NDArray[np.int64]
    starts: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    within: NDArray[np.int64]

    @property
    def num_pieces(self) -> int:
        """How many pieces there are."""
        return len(self.first_members) - 1

    def members(self, piece: int) -> range:
        """Members of a piece."""
        return range(int(self.first_members[piece]), int(self.first_members[piece + 1]))

    def span(self, piece: int) -> tuple[int, int]:
        """First byte of a piece in the tar, and how many bytes it has: the tokens, and what lies between them."""
        members = self.members(piece)
        start = int(self.starts[members[0]])
        return start, int(self.starts[members[-1]] + self.num_bytes[members[-1]]) - start


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The bytes of a piece. damage: what is wrong, by member of the shard; all other members are right."""

    data: memoryview
    damage: Mapping[int, DamagedShard] = field(default_factory=dict)

    def require(self, members: Iterable[int]) -> None:
        """Raises DamagedShard where one of `members` is damaged."""
        for member in members if self.damage else ():
            if member in self.damage:
                raise self.damage[member]


def block_bytes(split: Split, shuffle_block_shards: int) -> int:
    """Bytes of tokens that the largest block of a split may hold."""
    return int(np.sort(split.shard_tokens)[-shuffle_block_shards:].sum()) * split.dtype.itemsize


def cut(index: ShardIndex, itemsize: int, piece_bytes: int) -> Cut:
    """Members in the order of the tar, as many to a piece as fit into `piece_bytes`, one at least."""
    starts = index.member_offsets.astype(np.int64)
    num_bytes = index.member_tokens() * itemsize
    stops = starts + num_bytes
    firsts = [0]
    while (first := firsts[-1]) < len(starts):
        fitting = int(np.searchsorted(stops, starts[first] + piece_bytes, side="right"))
        firsts.append(max(fitting, first + 1))
    first_members = np.array(firsts, dtype=np.int64)
    piece_of = np.repeat(np.arange(len(firsts) - 1, dtype=np.int64), np.diff(first_members))
    return Cut(first_members, piece_of, starts, num_bytes, starts - starts[first_members[:-1]][piece_of])


class SplitPieces:
    """The pieces of one split, each member checked by its digest. Safe to use from several threads.

    A store whose objects are files on this machine is mapped and never copied; any other is read through `cache`, where
    there is one. A member with a wrong digest is fetched once more, past the cache; then it is damage. first_shard:
    what is added to this split's shard numbers in what is raised. memory: where pieces that are not mapped come to lie.
    """

    def __init__(
        self,
        store: ObjectStore,
        split: Split,
        index_of: Callable[[int], ShardIndex],
        *,
        piece_bytes: int = PIECE_BYTES,
        cache: NodeCache | None = None,
        first_shard: int = 0,
        memory: PieceMemory | None = None,
    ) -> None:
        self._store, self._split, self._index_of = store, split, index_of
        self._piece_bytes, self._cache, self._first_shard = piece_bytes, cache, first_shard
        self._memory = memory or PieceMemory(piece_bytes, _IDLE_BUFFERS)
        self._cuts = Recent[Cut](_CUTS)
        self._table = _table(np.zeros(0, np.int64), [])

    @property
    def url(self) -> str:
        """Where the split lies."""
        return self._split.url

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Of its tokens."""
        return self._split.dtype

    def cut(self, shard: int) -> Cut:
        """A shard in pieces; raises what its index raises."""
        return self._cuts.get(shard, lambda: cut(self._index_of(shard), self.dtype.itemsize, self._piece_bytes))

    def places(self, segments: SegmentColumns) -> tuple[Sequence[Place], NDArray[np.int64], NDArray[np.int64]]:
        """Where segments lie: a few pieces, and int64 [num_segments] each the piece of a segment, as its number among
        these, and the first byte within it. Raises what the indices raise.
        """
        table = self._table
        rows = table.rows(segments.shard)
        if rows is None:
            shards = np.unique(segments.shard)
            table = self._table = _table(shards, [self.cut(shard) for shard in shards.tolist()])
            rows = table.firsts[np.searchsorted(shards, segments.shard)]
        rows = rows + segments.member
        return table.pieces, table.piece_of[rows], table.within[rows] + segments.offset * self.dtype.itemsize

    def load(self, shard: int, number: int) -> Piece:
        """A piece, each of its members checked; raises the store's error where that is no damage."""
        cuts, entry = self.cut(shard), self._split.shard(shard)
        start, num_bytes = cuts.span(number)
        try:
            data = self._fetch(entry, start, num_bytes)
        except (MalformedShard, ObjectMissing):
            return self._one_by_one(shard, entry, number)
        wrong = self._wrong(shard, cuts.members(number), start, data)
        if not wrong:
            return Piece(memoryview(data))
        if self._cache is not None:
            self._cache.drop(_name(entry, start, num_bytes))
        return self._mended(shard, entry, number, data, wrong)

    def tokens(self, shard: int, number: int) -> list[Tokens]:
        """The tokens of each member of a piece; raises DamagedShard, or the store's error."""
        cuts, piece = self.cut(shard), self.load(shard, number)
        members = cuts.members(number)
        piece.require(members)
        counts = cuts.num_bytes // self.dtype.itemsize
        return [
            np.frombuffer(piece.data, self.dtype, int(counts[member]), int(cuts.within[member])) for member in members
        ]

    def _mended(self, shard: int, entry: ShardEntry, number: int, data: Bytes, wrong: list[int]) -> Piece:
        """A piece whose `wrong` members are fetched once more."""
        cuts = self.cut(shard)
        start, num_bytes = cuts.span(number)
        mended, reason, still = bytearray(num_bytes), _WRONG_DIGEST, wrong
        mended[: len(data)] = data
        try:
            again = self._read(entry, start, num_bytes)
        except (MalformedShard, ObjectMissing) as error:
            reason = why(error)
        else:
            still = self._wrong(shard, wrong, start, again)
            for member in set(wrong).difference(still):
                part = slice(int(cuts.within[member]), int(cuts.within[member] + cuts.num_bytes[member]))
                mended[part] = again[part]
        return Piece(memoryview(mended), {member: self._damage(shard, entry, member, reason) for member in still})

    def _one_by_one(self, shard: int, entry: ShardEntry, number: int) -> Piece:
        """A piece whose members are asked for one by one, as it can't be had as a whole."""
        cuts = self.cut(shard)
        data, damage = bytearray(cuts.span(number)[1]), {}
        for member in cuts.members(number):
            start, within, num_bytes = (int(of[member]) for of in (cuts.starts, cuts.within, cuts.num_bytes))
            try:
                found = self._read(entry, start, num_bytes)
            except (MalformedShard, ObjectMissing) as error:
                damage[member] = self._damage(shard, entry, member, why(error))
                continue
            if self._wrong(shard, [member], start, found):
                damage[member] = self._damage(shard, entry, member, _WRONG_DIGEST)
            else:
                data[within : within + num_bytes] = found
        return Piece(memoryview(data), damage)

    def _wrong(self, shard: int, members: Iterable[int], start: int, data: Bytes) -> list[int]:
        """Those of `members` whose digests are wrong in `data`, which begins at byte `start` of the tar."""
        cuts, digests, view = self.cut(shard), self._index_of(shard).member_xxh3, memoryview(data)
        wrong = []
        for member in members:
            offset = int(cuts.starts[member]) - start
            part = view[offset : offset + int(cuts.num_bytes[member])]
            if xxhash.xxh3_64_intdigest(part) != int(digests[member]):
                wrong.append(member)
        return wrong

    def _damage(self, shard: int, entry: ShardEntry, member: int, reason: str) -> DamagedShard:
        return DamagedShard(
            shard=self._first_shard + shard,
            name=entry.name,
            member=member,
            offset=int(self.cut(shard).starts[member]),
            key=tar_key(entry.name),
            why=reason,
            url=self._store.url,
        )

    def _fetch(self, entry: ShardEntry, start: int, num_bytes: int) -> Bytes:
        key = tar_key(entry.name)
        path = self._store.local_path(key)
        if path is not None:
            return map_file(path, key, start, num_bytes, entry.num_bytes)
        if self._cache is None:
            return self._read(entry, start, num_bytes)
        return self._cache.get(_name(entry, start, num_bytes), num_bytes, lambda: self._read(entry, start, num_bytes))

    def _read(self, entry: ShardEntry, offset: int, num_bytes: int) -> memoryview:
        """A ranged read; where it fails and the object has lost bytes, that is damage and not the network's fault."""
        key = tar_key(entry.name)
        try:
            return self._store.read_piece(key, offset, self._memory.take(num_bytes))
        except OutsideError as error:
            found = self._store.info(key).num_bytes
            if found == entry.num_bytes:
                raise
            raise MalformedShard(f"the object has {found} bytes, the manifest says {entry.num_bytes}") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Places of all members of the shards that were asked for last, most often those of one block. shards int64 [s],
    sorted; firsts int64 [s]: row of a shard's first member; piece_of, within: int64 [rows], as in `SplitPieces.places`.
    """

    shards: NDArray[np.int64]
    firsts: NDArray[np.int64]
    pieces: list[Place]
    piece_of: NDArray[np.int64]
    within: NDArray[np.int64]

    def rows(self, shards: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Row of each shard's first member; None where one is not in the table."""
        if not len(self.shards):
            return None
        found = self.shards[:-1].searchsorted(shards)
        return self.firsts[found] if (self.shards[found] == shards).all() else None


def _table(shards: NDArray[np.int64], cuts: Sequence[Cut]) -> _Table:
    none = np.zeros(0, np.int64)
    first_members = accumulate((len(each.piece_of) for each in cuts), initial=0)
    first_pieces = accumulate((each.num_pieces for each in cuts), initial=0)
    return _Table(
        shards,
        np.array([*first_members][:-1], np.int64),
        [(shard, piece) for shard, each in zip(shards.tolist(), cuts, strict=True) for piece in range(each.num_pieces)],
        np.concatenate([none, *(each.piece_of + first for each, first in zip(cuts, first_pieces, strict=False))]),
        np.concatenate([none, *(each.within for each in cuts)]),
    )


def _name(entry: ShardEntry, start: int, num_bytes: int) -> str:
    """A piece's name in a cache: what it holds, wherever the split lies."""
    return f"{entry.digest.rpartition(':')[2]}-{start}-{num_bytes}"
