"""One read of a range over several tries: what came before a connection broke is kept, and asked for no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import obstore

from phalanx.objects.base import StoreError, check_range
from phalanx.objects.retry import TransientError

if TYPE_CHECKING:
    from obstore.store import S3Store as Engine

_CHUNK_BYTES = 2**18


class RangeRead:
    """Reads [offset, offset + length) of an object (length None: to its end); `str` says how far it came. into: memory
    of `length` bytes for them, else they are kept as they come.

    Bytes of two versions of an object are never joined: where its ETag changes between two tries, the read begins anew.
    """

    def __init__(self, where: str, key: str, offset: int, length: int | None, into: memoryview | None = None) -> None:
        self._where, self._key, self._offset, self._length, self._into = where, key, offset, length, into
        self._chunks: list[memoryview] = []
        self._reached = offset
        self._e_tag: str | None = None

    def __str__(self) -> str:
        stop = "the end" if self._length is None else self._offset + self._length
        return f"{self._where}: bytes {self._offset} to {stop}, stopped at {self._reached}"

    def data(self) -> bytes | memoryview:
        """The bytes, once a try went through."""
        if self._into is not None:
            return self._into
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    def go_on(self, engine: Engine) -> None:
        """Asks for what is still missing. Raises TransientError where the reply is cut or the object was changed,
        StoreError where it holds other bytes than were asked for, and what obstore raises.
        """
        start = self._reached
        result = obstore.get(engine, self._key, options=self._options(start))
        self._require_same(result.meta["e_tag"])
        stop = self._offset + check_range(self._where, result.meta["size"], self._offset, self._length)
        if result.range[0] != start:
            raise StoreError(
                f"{self._where}: the server answered with bytes from {result.range[0]} when asked from {start}"
            )
        for part in result.stream(min_chunk_size=_CHUNK_BYTES):
            chunk = memoryview(part)
            if len(chunk) > stop - self._reached:
                raise StoreError(f"{self._where}: the server answered with more bytes than were asked for")
            self._keep(chunk)
        if self._reached < stop:
            raise TransientError(f"the answer ended {stop - self._reached} bytes early")

    def _keep(self, chunk: memoryview) -> None:
        """Appends a chunk to what is there."""
        if self._into is None:
            self._chunks.append(chunk)
        else:
            place = self._reached - self._offset
            # By numpy, which copies outside the interpreter's lock.
            np.frombuffer(self._into, np.uint8)[place : place + len(chunk)] = np.frombuffer(chunk, np.uint8)
        self._reached += len(chunk)

    def _options(self, start: int) -> obstore.GetOptions:
        if self._length is not None:
            return {"range": (start, self._offset + self._length)}
        return {"range": {"offset": start}} if start else {}

    def _require_same(self, e_tag: str | None) -> None:
        before, self._e_tag = self._e_tag, e_tag
        if self._reached > self._offset and before != e_tag:
            self._chunks.clear()
            self._reached = self._offset
            raise TransientError(f"the object was changed while it was read: its ETag was {before}, now {e_tag}")
