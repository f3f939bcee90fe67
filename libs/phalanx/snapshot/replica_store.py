"""A job's storage seen through the memory of nodes: tensor data of one sealed step is read from replicas, everything
else (parts, records, journal) from storage. Restoring from it is restoring: the same plan, the same digests of chunks.

Where a node does not answer or does not hold an object, the next that keeps it is asked. Where nobody has it the read
fails: tensor data of a sealed step lies nowhere else, and the next attempt goes on from an older, stored parent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from phalanx.core.digest import BytesLike
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, ObjectRef, keys
from phalanx.objects import ObjectInfo, ObjectStore, StoreError
from phalanx.objects.base import ObjectWriter, check_range

LOG = logging.getLogger(__name__)


class Holder(Protocol):
    """A node that keeps shares; a call goes to its memory, here or over the network."""

    def read(self, ref: CheckpointRef, key: str, offset: int, length: int) -> bytes:
        """Exactly these bytes of an object. Raises OutsideError, PhalanxError."""
        ...


class ReplicaStore(ObjectStore):
    """Read only. ref: the sealed step. objects: all tensor objects of it, by key. holders_of: who keeps an object, the
    nearest first.
    """

    def __init__(
        self,
        storage: ObjectStore,
        ref: CheckpointRef,
        objects: Mapping[str, ObjectRef],
        holders_of: Callable[[str], Sequence[Holder]],
    ) -> None:
        self._storage, self._ref, self._objects, self._holders_of = storage, ref, objects, holders_of
        self._prefix = keys.objects(ref)
        self.url = storage.url

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if not key.startswith(self._prefix):
            return self._storage.read(key, offset, length)
        wanted = check_range(f"replica {key}", self._named(key).num_bytes, offset, length)
        return self._ask(key, offset, wanted)

    def info(self, key: str) -> ObjectInfo:
        if not key.startswith(self._prefix):
            return self._storage.info(key)
        return ObjectInfo(key, self._named(key).num_bytes)

    def version(self, key: str) -> str:
        return self._storage.version(key) if not key.startswith(self._prefix) else self._named(key).digest

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._storage.list(prefix)

    def children(self, prefix: str = "") -> Iterator[str]:
        return self._storage.children(prefix)

    def create(self, key: str, data: BytesLike) -> None:
        raise self._read_only(key)

    def writer(self, key: str) -> ObjectWriter:
        raise self._read_only(key)

    def delete(self, key: str) -> None:
        raise self._read_only(key)

    def _named(self, key: str) -> ObjectRef:
        if key not in self._objects:
            raise StoreError(f"{key} is in no share of {self._ref}")
        return self._objects[key]

    def _ask(self, key: str, offset: int, length: int) -> bytes:
        problem: OutsideError | PhalanxError | None = None
        for holder in self._holders_of(key):
            try:
                data = holder.read(self._ref, key, offset, length)
            except (OutsideError, PhalanxError) as error:
                LOG.warning("replica %s: %s", key, error)
                problem = error
                continue
            if len(data) == length:
                return data
            problem = StoreError(f"replica {key}: {len(data)} bytes came of {length}")
        raise StoreError(f"no node has {key} of {self._ref}: its share is lost") from problem

    def _read_only(self, key: str) -> StoreError:
        return StoreError(f"{key}: replicas of {self._ref} are read only")
