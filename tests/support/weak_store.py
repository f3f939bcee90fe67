"""A store whose put has no condition: what is written last is there."""

from __future__ import annotations

from phalanx.core.digest import BytesLike
from phalanx.objects import ObjectExists
from phalanx.objects.memory import MemoryStore


class Overwriting(MemoryStore):
    """No create-only put, but for objects of exactly the bytes `spares`."""

    def __init__(self, spares: bytes | None = None) -> None:
        super().__init__("bucket://overwriting")
        self._spares = spares

    def create(self, key: str, data: BytesLike) -> None:
        while True:
            if data != self._spares:
                self.delete(key)
            try:
                return super().create(key, data)
            except ObjectExists:
                if data == self._spares:
                    raise
