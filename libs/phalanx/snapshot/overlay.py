"""A job's storage with faster places before it for some of what is read: what restores asks one store."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.core.digest import BytesLike
from phalanx.objects import ObjectInfo, ObjectStore, StoreError
from phalanx.objects.base import ObjectWriter


class Overlay(ObjectStore):
    """Read only; all that a subclass does not answer itself is storage's."""

    def __init__(self, storage: ObjectStore) -> None:
        self._storage, self.url = storage, storage.url

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._storage.read(key, offset, length)

    def read_view(self, key: str, offset: int, length: int, scratch: memoryview) -> memoryview:
        return self._storage.read_view(key, offset, length, scratch)

    def info(self, key: str) -> ObjectInfo:
        return self._storage.info(key)

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
        return StoreError(f"{key}: what restores is read only")
