"""One read of a range over several tries: what came before a connection broke is kept, and asked for no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import obstore

from phalanx.objects.base import StoreError, check_range
from phalanx.objects.retry import TransientError

if TYPE_CHECKING:
    from obstore.store import S3Store as Engine

_CHUNK_BYTES = 2**18


class RangeRead:
    """Reads [offset, offset + length) of an object (length None: to its end); `str` says how far it came.

    Bytes of two versions of an object are never joined: where its ETag changes between two tries, the read begins anew.
    """

    def __init__(self, where: str, key: str, offset: int, length: int | None) -> None:
        self._where, self._key, self._offset, self._length = where, key, offset, length
        self._chunks: list[bytes | memoryview] = []
        self._e_tag: str | None = None

    def __str__(self) -> str:
        stop = "the end" if self._length is None else self._offset + self._length
        return f"{self._where}: bytes {self._offset} to {stop}, stopped at {self._reached}"

    @property
    def _reached(self) -> int:
        return self._offset + sum(map(len, self._chunks))

    def data(self) -> bytes | memoryview:
        """The bytes, once a try went through."""
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    def go_on(self, engine: Engine, *, in_one: bool = False) -> None:
        """Asks for what is still missing. Raises TransientError where the reply is cut or the object was changed,
        StoreError where it holds other bytes than were asked for, and what obstore raises.

        in_one: the reply is received as a whole, in one buffer and outside the interpreter's lock; of one that breaks
        nothing is kept.
        """
        start = self._reached
        result = obstore.get(engine, self._key, options=self._options(start))
        self._require_same(result.meta["e_tag"])
        stop = self._offset + check_range(self._where, result.meta["size"], self._offset, self._length)
        if result.range[0] != start:
            raise StoreError(
                f"{self._where}: the server answered with bytes from {result.range[0]} when asked from {start}"
            )
        for chunk in [memoryview(result.bytes())] if in_one else result.stream(min_chunk_size=_CHUNK_BYTES):
            self._chunks.append(chunk)
            start += len(chunk)
        if start > stop:
            raise StoreError(f"{self._where}: the server answered with more bytes than were asked for")
        if start < stop:
            raise TransientError(f"the answer ended {stop - start} bytes early")

    def _options(self, start: int) -> obstore.GetOptions:
        if self._length is not None:
            return {"range": (start, self._offset + self._length)}
        return {"range": {"offset": start}} if start else {}

    def _require_same(self, e_tag: str | None) -> None:
        before, self._e_tag = self._e_tag, e_tag
        if self._chunks and before != e_tag:
            self._chunks.clear()
            raise TransientError(f"the object was changed while it was read: its ETag was {before}, now {e_tag}")
