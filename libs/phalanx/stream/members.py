"""What is known of members before their tokens are read: the length indices of shards, each checked by its digest,
fetched once more where it is wrong, then named as damage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import Split, index_key
from phalanx.stream.recent import Recent
from phalanx.stream.shards import MalformedShard, ShardIndex, decode_index

OPEN_INDICES = 16
_AT_ONCE = 8

_Result = TypeVar("_Result")


class DamagedShard(OutsideError):
    """Bytes of a shard that are wrong twice in a row; a rank reports `key` and `why`.

    shard: its number, counted through over all sources; member: None for the index; offset: bytes into the object `key`
    (below the split at `url`); why: in words.
    """

    def __init__(
        self, *, shard: int, name: str, member: int | None, offset: int, key: str, why: str, url: str = ""
    ) -> None:
        self.shard, self.name, self.member, self.offset, self.key, self.why = shard, name, member, offset, key, why
        place = f"{url}/{key}" if url else key
        super().__init__(f"shard {name} is damaged: {self.told} of {place}: {why}; bring the object back as it was")

    @property
    def told(self) -> str:
        """Where in the object it is."""
        what = "index" if self.member is None else f"member {self.member}"
        return f"{what} at byte {self.offset}"


class ShardIndices:
    """Length indices by shard number, checked by the manifest's digest; the last `capacity` are kept. Safe to use from
    several threads.

    A reader wants the indices of two blocks at once, so a capacity below twice the order's `shuffle_block_shards`
    fetches indices again and again. first_shard: what is added to a number where damage is told.
    """

    def __init__(self, store: ObjectStore, split: Split, capacity: int = OPEN_INDICES, first_shard: int = 0) -> None:
        self._store, self._split, self._first_shard = store, split, first_shard
        self._kept = Recent[ShardIndex](capacity)

    def __call__(self, shard: int) -> ShardIndex:
        """The index of a shard; raises DamagedShard where its bytes are wrong or missing, or the store's error where it
        fails.
        """
        return self._kept.get(shard, lambda: self._fetch(shard))

    def many(self, shards: Sequence[int]) -> list[ShardIndex]:
        """The indices of several shards, asked for at once; raises what the first of them raises that fails."""
        if len(shards) <= 1:
            return [self(shard) for shard in shards]
        with ThreadPoolExecutor(min(len(shards), _AT_ONCE), thread_name_prefix="phalanx-indices") as threads:
            return list(threads.map(self, shards))

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
            number = self._first_shard + shard
            raise DamagedShard(
                shard=number, name=entry.name, member=None, offset=0, key=key, why=why(error), url=self._store.url
            ) from error


def _twice(attempt: Callable[[], _Result]) -> _Result:
    try:
        return attempt()
    except (MalformedShard, ObjectMissing):
        return attempt()


def why(error: Exception) -> str:
    """What is wrong with an object, in words."""
    return "the object is missing" if isinstance(error, ObjectMissing) else str(error)
