"""A shard's members in pieces: runs of adjacent members that one ranged read fetches.

A piece is what is asked of the store, kept on disk and let go together; a member is what its digest guards. Which
members make a piece follows from the shard's index and the bound alone, so all ranks of a node cut alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.core.errors import OutsideError
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import ShardEntry, Split, tar_key
from phalanx.stream.mapped import Bytes, map_file
from phalanx.stream.members import DamagedShard, why
from phalanx.stream.node_cache import NodeCache
from phalanx.stream.recent import Recent
from phalanx.stream.shards import MalformedShard, ShardIndex

PIECE_BYTES = 4 << 20
_CUTS = 256
_WRONG_DIGEST = "its bytes do not have the digest that the index gives"
Tokens = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One shard in pieces. first_members int64 [pieces + 1]; piece_of int64 [members]; starts, num_bytes int64
    [members]: where a member's tokens lie in the tar.
    """

    first_members: NDArray[np.int64]
    piece_of: NDArray[np.int64]
    starts: NDArray[np.int64]
    num_bytes: NDArray[np.int64]

    def members(self, piece: int) -> range:
        """Members of a piece."""
        return range(int(self.first_members[piece]), int(self.first_members[piece + 1]))

    def span(self, piece: int) -> tuple[int, int]:
        """First byte of a piece in the tar, and how many bytes it has: the tokens, and what lies between them."""
        members = self.members(piece)
        start = int(self.starts[members[0]])
        return start, int(self.starts[members[-1]] + self.num_bytes[members[-1]]) - start


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
    return Cut(first_members, piece_of, starts, num_bytes)


class SplitPieces:
    """The pieces of one split, each member checked by its digest. Safe to use from several threads.

    A store whose objects are files on this machine is mapped and never copied; any other is read through `cache`, where
    there is one. A member with a wrong digest is fetched once more, past the cache; then it is damage. first_shard:
    what is added to this split's shard numbers in what is raised.
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
    ) -> None:
        self._store, self._split, self._index_of = store, split, index_of
        self._piece_bytes, self._cache, self._first_shard = piece_bytes, cache, first_shard
        self._cuts = Recent[Cut](_CUTS)

    @property
    def url(self) -> str:
        """Where the split lies."""
        return self._split.url

    def cut(self, shard: int) -> Cut:
        """A shard in pieces; raises what its index raises."""
        itemsize = self._split.dtype.itemsize
        return self._cuts.get(shard, lambda: cut(self._index_of(shard), itemsize, self._piece_bytes))

    def load(self, shard: int, piece: int) -> list[Tokens | DamagedShard]:
        """The tokens of each member of a piece, or its damage; raises the store's error where that is none."""
        cuts, entry = self.cut(shard), self._split.shard(shard)
        start, num_bytes = cuts.span(piece)
        members = cuts.members(piece)
        try:
            found = self._checked(shard, members, start, self._fetch(entry, start, num_bytes))
        except (MalformedShard, ObjectMissing):
            return [self._alone(shard, entry, member) for member in members]
        if all(tokens is not None for tokens in found):
            return cast("list[Tokens | DamagedShard]", found)
        if self._cache is not None:
            self._cache.drop(_name(entry, start, num_bytes))
        again: list[Tokens | None] = [None] * len(members)
        reason = _WRONG_DIGEST
        try:
            again = self._checked(shard, members, start, self._read(entry, start, num_bytes))
        except (MalformedShard, ObjectMissing) as error:
            reason = why(error)
        return [
            first if first is not None else second if second is not None else self._damage(shard, entry, member, reason)
            for member, first, second in zip(members, found, again, strict=True)
        ]

    def _checked(self, shard: int, members: range, start: int, data: Bytes) -> list[Tokens | None]:
        """Tokens of the members in `data`, which begins at byte `start` of the tar; None where a digest is wrong."""
        cuts, digests, view = self.cut(shard), self._index_of(shard).member_xxh3, memoryview(data)
        found: list[Tokens | None] = []
        for member in members:
            offset = int(cuts.starts[member]) - start
            part = view[offset : offset + int(cuts.num_bytes[member])]
            is_right = xxhash.xxh3_64_intdigest(part) == int(digests[member])
            found.append(np.frombuffer(part, self._split.dtype) if is_right else None)
        return found

    def _alone(self, shard: int, entry: ShardEntry, member: int) -> Tokens | DamagedShard:
        """One member by a request of its own, where its piece can't be had as a whole."""
        cuts = self.cut(shard)
        start = int(cuts.starts[member])
        try:
            data = self._read(entry, start, int(cuts.num_bytes[member]))
        except (MalformedShard, ObjectMissing) as error:
            return self._damage(shard, entry, member, why(error))
        (tokens,) = self._checked(shard, range(member, member + 1), start, data)
        return tokens if tokens is not None else self._damage(shard, entry, member, _WRONG_DIGEST)

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

    def _read(self, entry: ShardEntry, offset: int, num_bytes: int) -> bytes:
        """A ranged read; where it fails and the object has lost bytes, that is damage and not the network's fault."""
        key = tar_key(entry.name)
        try:
            return self._store.read(key, offset, num_bytes)
        except OutsideError as error:
            found = self._store.info(key).num_bytes
            if found == entry.num_bytes:
                raise
            raise MalformedShard(f"the object has {found} bytes, the manifest says {entry.num_bytes}") from error


def _name(entry: ShardEntry, start: int, num_bytes: int) -> str:
    """A piece's name in a cache: what it holds, wherever the split lies."""
    return f"{entry.digest.rpartition(':')[2]}-{start}-{num_bytes}"
