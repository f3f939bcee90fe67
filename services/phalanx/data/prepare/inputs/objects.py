"""Input files that are objects in a bucket: whole, as a stream of ranges, or sought in.

An object that is gone, or has another size than it was listed with, is named as changed.
"""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from typing import Any

from phalanx.data.prepare.inputs.ahead import ahead
from phalanx.data.prepare.inputs.errors import ChangedInput
from phalanx.objects import ObjectMissing, ObjectStore, StoreError

BLOCK_BYTES = 8 * 2**20
_TAIL_BYTES = 2**18


class InputObject:
    """One object as it was listed, `num_bytes` long."""

    def __init__(self, store: ObjectStore, key: str, num_bytes: int) -> None:
        self._store, self._key, self.num_bytes = store, key, num_bytes
        self.location = f"{store.url}/{key}"

    def require_unchanged(self) -> None:
        """Raises ChangedInput where the object is gone or has another size by now."""
        try:
            found = self._store.info(self._key).num_bytes
        except ObjectMissing as error:
            raise ChangedInput(self.location, "but it is gone") from error
        if found != self.num_bytes:
            raise ChangedInput.of_size(self.location, self.num_bytes, found)

    def whole(self) -> bytes:
        """All bytes."""
        try:
            data = self._store.read(self._key)
        except ObjectMissing as error:
            raise ChangedInput(self.location, "but it is gone") from error
        if len(data) != self.num_bytes:
            raise ChangedInput.of_size(self.location, self.num_bytes, len(data))
        return data

    def range(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop)."""
        try:
            return self._store.read(self._key, start, stop - start)
        except (ObjectMissing, StoreError):
            self.require_unchanged()
            raise

    def blocks(self, start: int, stop: int) -> Generator[bytes]:
        """The bytes from `start` to the object's end, fetched ahead up to `stop`: what lies behind it is read only
        where it is asked for.
        """
        yield from ahead(lambda bounds: self.range(*bounds), _bounds(start, stop, BLOCK_BYTES), 1)
        for bounds in _bounds(stop, self.num_bytes, _TAIL_BYTES):
            yield self.range(*bounds)


def _bounds(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    return ((each, min(each + step, stop)) for each in range(start, stop, step))


class ForwardStream(io.RawIOBase):
    """An object's bytes from blocks, read forward."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._ready = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._ready = memoryview(block)
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


class SeekingStream(io.RawIOBase):
    """An object that can be sought in: each read is one request, for a reader that asks for large ranges."""

    def __init__(self, source: InputObject) -> None:
        self._source, self._position = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.num_bytes}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        stop = min(self._position + len(target), self._source.num_bytes)
        data = self._source.range(self._position, stop) if stop > self._position else b""
        target[: len(data)] = data
        self._position += len(data)
        return len(data)
