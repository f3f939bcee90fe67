"""Fetches indices and members of shards: each checked by its digest, fetched once more where it is wrong, then named as
damage.

Members are read whole by ranged reads and kept, least recently used last, up to a bound in bytes; a few threads fetch
ahead.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import Split, index_key, tar_key
from phalanx.stream.shards import MalformedShard, ShardIndex, decode_index

DEFAULT_CACHE_BYTES = 256 << 20
OPEN_INDICES = 16

_Result = TypeVar("_Result")
Tokens = NDArray[np.unsignedinteger]


class DamagedShard(OutsideError):
    """Bytes of a shard that are wrong twice in a row; a rank reports `key` and `why`.

    shard: its number; member: None for the index; offset: bytes into the object `key` (below the split); why: in words.
    """

    def __init__(self, *, shard: int, name: str, member: int | None, offset: int, key: str, why: str) -> None:
        self.shard, self.name, self.member, self.offset, self.key, self.why = shard, name, member, offset, key, why
        what = "index" if member is None else f"member {member}"
        super().__init__(f"shard {name} is damaged: {what} at byte {offset} of {key}: {why}")


class ShardIndices:
    """Length indices by shard number, checked by the manifest's digest; the last `capacity` are kept. Safe to use from
    several threads.

    A reader wants the indices of two blocks at once, so a capacity below twice the order's `shuffle_block_shards`
    fetches indices again and again.
    """

    def __init__(self, store: ObjectStore, split: Split, capacity: int = OPEN_INDICES) -> None:
        self._store, self._split, self._capacity = store, split, capacity
        self._kept: OrderedDict[int, ShardIndex] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, shard: int) -> ShardIndex:
        """The index of a shard; raises DamagedShard where its bytes are wrong or missing, or the store's error where it
        fails.
        """
        with self._lock:
            if shard in self._kept:
                self._kept.move_to_end(shard)
                return self._kept[shard]
        index = self._fetch(shard)
        with self._lock:
            self._kept[shard] = index
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        return index

    def _fetch(self, shard: int) -> ShardIndex:
        entry = self._split.shard(shard)
        key = index_key(entry.name)

        def attempt() -> ShardIndex:
            data = self._store.read(key)
            if xxh3(data) != entry.index_digest:
                raise MalformedShard(f"its digest is not {entry.index_digest}")
            index = decode_index(data)
            if len(index.lengths) != entry.num_documents or index.lengths.sum(dtype=np.int64) != entry.num_tokens:
                raise MalformedShard("it disagrees with the manifest's totals")
            return index

        try:
            return _twice(attempt)
        except (MalformedShard, ObjectMissing) as error:
            raise DamagedShard(shard=shard, name=entry.name, member=None, offset=0, key=key, why=_why(error)) from error


class MemberCache:
    """Token arrays of members by (shard, member), fetched by a few threads and kept up to `cache_bytes`.

    A member in use stays alive through the array that its reader holds, so eviction never races a reader; a single
    member larger than the bound is still served, and kept alone.
    """

    def __init__(
        self,
        store: ObjectStore,
        split: Split,
        index_of: Callable[[int], ShardIndex],
        cache_bytes: int,
        num_threads: int,
        deadline_s: float,
    ) -> None:
        assert cache_bytes > 0 and num_threads > 0
        self._store, self._split, self._index_of = store, split, index_of
        self._cache_bytes, self._deadline_s = cache_bytes, deadline_s
        self._kept: OrderedDict[tuple[int, int], tuple[Future[Tokens], int]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="phalanx-stream")
        self._pid = os.getpid()

    def close(self) -> None:
        """Ends the threads; what they are fetching is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the members held or being fetched."""
        return self._kept_bytes

    def ahead(self, members: Iterable[tuple[int, int]]) -> None:
        """Starts to fetch members that will be needed, until they would push each other out."""
        budget, seen = self._cache_bytes, set[tuple[int, int]]()
        for member in members:
            if member in seen:
                continue
            seen.add(member)
            budget -= self._known_bytes(member)
            if budget < 0:
                return
            self._start(member)

    def get(self, members: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Tokens]:
        """The token arrays of `members`; raises DamagedShard, the store's error, or OutsideError at the deadline."""
        started = {member: self._start(member) for member in dict.fromkeys(members)}
        try:
            return {member: future.result(self._deadline_s) for member, future in started.items()}
        except FutureTimeout as error:
            raise OutsideError(f"reading {self._split.url} took longer than {self._deadline_s:g} s") from error

    def _start(self, member: tuple[int, int]) -> Future[Tokens]:
        assert os.getpid() == self._pid, "a reader made before a fork must not be used after it"
        kept = self._touch(member)
        if kept is not None:
            return kept
        num_bytes = self._num_bytes(member)
        with self._lock:
            if member in self._kept:
                return self._kept[member][0]
            future = self._pool.submit(self._fetch, member)
            self._kept[member] = future, num_bytes
            self._kept_bytes += num_bytes
            while self._kept_bytes > self._cache_bytes and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1][1]
        future.add_done_callback(lambda done: self._forget_failed(member, done))
        return future

    def _touch(self, member: tuple[int, int]) -> Future[Tokens] | None:
        """The member if it is kept, marked as used now."""
        with self._lock:
            if member not in self._kept:
                return None
            self._kept.move_to_end(member)
            return self._kept[member][0]

    def _forget_failed(self, member: tuple[int, int], done: Future[Tokens]) -> None:
        """A failure is told to those who wait for it, and not kept for those who ask later."""
        if not done.cancelled() and done.exception() is None:
            return
        with self._lock:
            if member in self._kept and self._kept[member][0] is done:
                self._kept_bytes -= self._kept.pop(member)[1]

    def _known_bytes(self, member: tuple[int, int]) -> int:
        """Size of a member, without its shard's index where the member is kept."""
        with self._lock:
            kept = self._kept.get(member)
        return self._num_bytes(member) if kept is None else kept[1]

    def _num_bytes(self, member: tuple[int, int]) -> int:
        index = self._index_of(member[0])
        first, last = index.member_first_documents()[member[1] : member[1] + 2]
        return int(index.lengths[first:last].sum(dtype=np.int64)) * self._split.dtype.itemsize

    def _fetch(self, member: tuple[int, int]) -> Tokens:
        shard, number = member
        index, name = self._index_of(shard), self._split.shard(shard).name
        key, offset = tar_key(name), int(index.member_offsets[number])
        num_bytes = self._num_bytes(member)

        def attempt() -> Tokens:
            data = self._read(key, offset, num_bytes, self._split.shard(shard).num_bytes)
            if xxhash.xxh3_64_intdigest(data) != int(index.member_xxh3[number]):
                raise MalformedShard("its bytes do not have the digest that the index gives")
            return np.frombuffer(data, self._split.dtype)

        try:
            return _twice(attempt)
        except (MalformedShard, ObjectMissing) as error:
            raise DamagedShard(
                shard=shard, name=name, member=number, offset=offset, key=key, why=_why(error)
            ) from error

    def _read(self, key: str, offset: int, num_bytes: int, whole_bytes: int) -> bytes:
        """A ranged read; where it fails and the object has lost bytes, that is damage and not the network's fault."""
        try:
            return self._store.read(key, offset, num_bytes)
        except OutsideError as error:
            found = self._store.info(key).num_bytes
            if found == whole_bytes:
                raise
            raise MalformedShard(f"the object has {found} bytes, the manifest says {whole_bytes}") from error


def _twice(attempt: Callable[[], _Result]) -> _Result:
    try:
        return attempt()
    except (MalformedShard, ObjectMissing):
        return attempt()


def _why(error: Exception) -> str:
    return "the object is missing" if isinstance(error, ObjectMissing) else str(error)
