"""`memory://`: objects in this process, for tests and dry runs; a fresh, empty store each time one is opened."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from phalanx.core.digest import BytesLike, xxh3
from phalanx.objects.base import (
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    ObjectWriter,
    as_view,
    check_key,
    check_range,
)


class MemoryStore(ObjectStore):
    """A dictionary with the contract of a store; threads may share it."""

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def _get(self, key: str) -> bytes:
        with self._lock:
            data = self._objects.get(check_key(key))
        if data is None:
            raise ObjectMissing(key)
        return data

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self._get(key)
        return data[offset : offset + check_range(f"{self.url} {key}", len(data), offset, length)]

    def info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self._get(key)))

    def version(self, key: str) -> str:
        return xxh3(self._get(key))

    def create(self, key: str, data: BytesLike) -> None:
        copy = bytes(as_view(data))
        with self._lock:
            if check_key(key) in self._objects:
                raise ObjectExists(key)
            self._objects[key] = copy

    def writer(self, key: str) -> ObjectWriter:
        return MemoryWriter(self, check_key(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            found = [ObjectInfo(key, len(data)) for key, data in self._objects.items() if key.startswith(prefix)]
        yield from sorted(found, key=lambda info: info.key)

    def children(self, prefix: str = "") -> Iterator[str]:
        with self._lock:
            keys = [key for key in self._objects if key.startswith(prefix)]
        rests = (key.removeprefix(prefix).partition("/") for key in keys)
        yield from sorted({prefix + head + slash for head, slash, _ in rests})

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)


class MemoryWriter(ObjectWriter):
    """Collects chunks, then creates the object."""

    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store, self._key, self._data = store, key, bytearray()

    def write(self, chunk: BytesLike) -> None:
        self._data += as_view(chunk)

    def commit(self) -> None:
        self._store.create(self._key, self._data)

    def abort(self) -> None:
        self._data = bytearray()
