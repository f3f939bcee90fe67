"""A job's storage with the memory of this node before it: tensor data of a step that lies here is read here, all else
from storage. Restoring from it is restoring: the same plan, the same digests of chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from phalanx.objects import ObjectInfo, ObjectStore
from phalanx.objects.base import check_range
from phalanx.snapshot.overlay import Overlay


class ReplicaStore(Overlay):
    """held: bytes of whole objects, by key; every one of them lies in storage too. num_bytes: read of them so far."""

    def __init__(self, storage: ObjectStore, held: Mapping[str, memoryview]) -> None:
        super().__init__(storage)
        self._held, self._lock = held, threading.Lock()
        self.num_bytes = 0

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        view = self._held.get(key)
        return super().read(key, offset, length) if view is None else bytes(self._part(key, view, offset, length))

    def read_view(self, key: str, offset: int, length: int, scratch: memoryview) -> memoryview:
        view = self._held.get(key)
        if view is None:
            return super().read_view(key, offset, length, scratch)
        return self._part(key, view, offset, length)

    def info(self, key: str) -> ObjectInfo:
        view = self._held.get(key)
        return super().info(key) if view is None else ObjectInfo(key, len(view))

    def _part(self, key: str, view: memoryview, offset: int, length: int | None) -> memoryview:
        wanted = check_range(f"replica {key}", len(view), offset, length)
        with self._lock:
            self.num_bytes += wanted
        return view[offset : offset + wanted]
