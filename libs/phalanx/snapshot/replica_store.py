"""A job's storage with the memory of this node before it: tensor data of a step that lies here is read here, all else
from storage. Restoring from it is restoring: the same plan, the same digests of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from phalanx.core.digest import BytesLike
from phalanx.objects import ObjectInfo, ObjectStore, StoreError
from phalanx.objects.base import ObjectWriter, check_range


class ReplicaStore(ObjectStore):
    """Read only. held: bytes of whole objects, by key; every one of them lies in storage too."""

    def __init__(self, storage: ObjectStore, held: Mapping[str, memoryview]) -> None:
        self._storage, self._held = storage, held
        self.url = storage.url
        self.num_bytes = 0

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        view = self._held.get(key)
        return self._storage.read(key, offset, length) if view is None else bytes(self._part(key, view, offset, length))

    def read_view(self, key: str, offset: int, length: int, scratch: memoryview) -> memoryview:
        view = self._held.get(key)
        if view is None:
            return self._storage.read_view(key, offset, length, scratch)
        return self._part(key, view, offset, length)

    def _part(self, key: str, view: memoryview, offset: int, length: int | None) -> memoryview:
        wanted = check_range(f"replica {key}", len(view), offset, length)
        self.num_bytes += wanted
        return view[offset : offset + wanted]

    def info(self, key: str) -> ObjectInfo:
        view = self._held.get(key)
        return self._storage.info(key) if view is None else ObjectInfo(key, len(view))

    def version(self, key: str) -> str:
        return self._storage.version(key)

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

    def _read_only(self, key: str) -> StoreError:
        return StoreError(f"{key}: memory is read only")
