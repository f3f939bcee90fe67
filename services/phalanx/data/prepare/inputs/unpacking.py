"""gzip and Zstandard as a stream of bounded memory that never takes a cut file for a whole one.

Both formats are sequences of frames, each with its own end mark and (always for gzip, often for Zstandard) a checksum;
what one frame leaves over begins the next. A file that ends inside a frame, or holds anything that is no frame (zeros
behind the last gzip frame are padding), is corrupt. Only a file of several frames that was cut between two of them
looks whole: nothing in it says that more should follow. Sources: RFC 1952 (2.2), RFC 8878 (3.1).
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.inputs.errors import CorruptInput

_READ_BYTES = 4096  # what these unpack to is in memory at once: 128 MiB at the very worst
_MAX_WINDOW_BYTES = 2**31
_NAMES = {"gz": "gzip", "zst": "Zstandard"}


class _Frame(Protocol):
    """What zlib's and zstandard's decompression objects have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def unpacked(stream: BinaryIO, compression: str, location: str) -> BinaryIO:
    """`stream` unpacked ("gz" or "zst"; "" gives it back as it is).

    Reading raises CorruptInput with the offset in the packed file.
    """
    if not compression:
        return stream
    begin, error = _codec(compression, location)
    return io.BufferedReader(_Unpacked(stream, begin, error, _NAMES[compression], location), 2**17)


def _codec(compression: str, location: str) -> tuple[Callable[[], _Frame], type[Exception]]:
    if compression == "gz":
        return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
    try:
        import zstandard
    except ImportError as error:
        raise PhalanxError(
            location, expected="zstandard to be installed, which reads .zst", remedy="pip install 'phalanx[data]'"
        ) from error
    context = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    return context.decompressobj, zstandard.ZstdError


class _Unpacked(io.RawIOBase):
    """The unpacked bytes, read forward."""

    def __init__(
        self, stream: BinaryIO, begin: Callable[[], _Frame], error: type[Exception], name: str, location: str
    ) -> None:
        self._stream, self._begin, self._error = stream, begin, error
        self._name, self._location = name, location
        self._frame: _Frame | None = None
        self._packed = b""
        self._offset = 0
        self._has_frames = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready and self._advance():
            pass
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _advance(self) -> bool:
        """Unpacks the next few bytes; False at the end of the file."""
        if not self._packed:
            self._packed = self._stream.read(_READ_BYTES)
        if not self._packed:
            self._require_end()
            return False
        if self._frame is None:
            self._skip_padding()
            if not self._packed:
                return True
            self._frame, self._has_frames = self._begin(), True
        try:
            self._ready = memoryview(self._frame.decompress(self._packed))
        except self._error as error:
            raise self._corrupt(self._offset, f"but its bytes are no {self._name} ({error})") from error
        rest = self._frame.unused_data if self._frame.eof else b""
        self._offset += len(self._packed) - len(rest)
        self._packed = rest
        if self._frame.eof:
            self._frame = None
        return True

    def _skip_padding(self) -> None:
        if self._name == "gzip" and self._has_frames:
            rest = self._packed.lstrip(b"\0")
            self._offset += len(self._packed) - len(rest)
            self._packed = rest

    def _require_end(self) -> None:
        if self._frame is not None:
            raise self._corrupt(self._offset, "but the file ends in the middle of its data")
        if not self._has_frames:
            raise self._corrupt(0, "but the file is empty")

    def _corrupt(self, offset: int, found: str) -> CorruptInput:
        return CorruptInput(self._location, offset, expected=f"a whole {self._name} file", found=found)
