"""The members of a tar, streamed; a tar that is cut or damaged is never taken for a shorter one.

A whole tar ends with two blocks of zeros and holds nothing but zeros behind them. Read are ustar, GNU (long names,
large sizes) and pax headers; every header's checksum is tested. Source: POSIX.1-2024, pax, "ustar Interchange Format"
and "pax Extended Header".
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from phalanx.data.prepare.inputs.errors import CorruptInput

BLOCK = tarfile.BLOCKSIZE
_COPY_BYTES, _TAKE_BYTES = 2**20, 2**26
_HEADER_LIMIT_BYTES = 2**20
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_EXTENSIONS = (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL)
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_LINKS = (tarfile.LNKTYPE, tarfile.SYMTYPE)
_LONGEST_NUMBER = 20


@dataclass(frozen=True, slots=True)
class Member:
    """A file or a link in a tar; offset: of its header, in the tar (the unpacked one, where it is compressed)."""

    name: str
    num_bytes: int
    offset: int
    is_link: bool


class TarStream:
    """Iterate over the members; `read` gives the data of the one at hand, before the next is asked for."""

    def __init__(self, stream: BinaryIO, location: str) -> None:
        self._stream, self._location = stream, location
        self._offset = 0
        self._left = 0  # of the member at hand, padding included
        self._extended: dict[str, str] = {}

    def __iter__(self) -> Iterator[Member]:
        """Raises CorruptInput with the offset in the tar."""
        while True:
            self._skip(self._left)
            offset, header = self._offset, self._take(BLOCK)
            if not header.strip(b"\0"):
                self._require_end(offset)
                return
            info = self._parsed(header, offset)
            if info.type in _EXTENSIONS:
                self._extend(info, offset)
                continue
            extended, self._extended = self._extended, {}
            num_bytes = self._size(extended, info, offset)
            self._left = _padded(num_bytes) if info.type in _FILES or info.type not in tarfile.SUPPORTED_TYPES else 0
            if info.type in _FILES or info.type in _LINKS:
                yield Member(extended.get("path", info.name), num_bytes, offset, info.type in _LINKS)

    def read(self, member: Member) -> bytes:
        """All bytes of the member that was given last; once."""
        data = self._take(member.num_bytes)
        self._left -= member.num_bytes
        return data

    def _parsed(self, header: bytes, offset: int) -> tarfile.TarInfo:
        try:
            return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise self._corrupt(offset, f"but its header there is none ({error})") from error

    def _extend(self, info: tarfile.TarInfo, offset: int) -> None:
        """Takes in a header that says more about the next member."""
        if not 0 <= info.size <= _HEADER_LIMIT_BYTES:
            raise self._corrupt(offset, f"but an extended header of {info.size} bytes is there")
        data = self._take(info.size)
        self._skip(_padded(info.size) - info.size)
        if info.type == _LONG_NAME:
            self._extended["path"] = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif info.type == _PAX:
            self._extended |= self._pax_records(data, offset)

    def _pax_records(self, data: bytes, offset: int) -> dict[str, str]:
        """`<length> <key>=<value>\\n`, one after the other."""
        records = {}
        while data:
            length, space, _ = data.partition(b" ")
            if not space or not length.isdigit() or len(length) > _LONGEST_NUMBER or not 0 < int(length) <= len(data):
                raise self._corrupt(offset, "but its extended header there is broken")
            key, _, value = data[len(length) + 1 : int(length)].removesuffix(b"\n").partition(b"=")
            records[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
            data = data[int(length) :]
        return records

    def _size(self, extended: dict[str, str], info: tarfile.TarInfo, offset: int) -> int:
        given = extended.get("size", str(info.size))
        sparse = info.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in extended)
        if sparse or not given.isdecimal() or len(given) > _LONGEST_NUMBER:
            raise self._corrupt(offset, "but a sparse member or one without a size is there")
        return int(given)

    def _take(self, num_bytes: int) -> bytes:
        data = self._stream.read(min(num_bytes, _TAKE_BYTES))
        while len(data) < num_bytes:  # no more memory than there is data, whatever a header says
            more = self._stream.read(min(num_bytes - len(data), _TAKE_BYTES))
            if not more:
                raise self._cut(self._offset + len(data))
            data += more
        self._offset += num_bytes
        return data

    def _skip(self, num_bytes: int) -> None:
        while num_bytes:
            num_bytes -= len(self._take(min(num_bytes, _COPY_BYTES)))
        self._left = 0

    def _require_end(self, offset: int) -> None:
        """The end's second block of zeros, and nothing but zeros behind it."""
        behind = self._take(BLOCK)
        while behind:
            if behind.strip(b"\0"):
                raise self._corrupt(offset, "but a block of zeros is there and more data behind it")
            behind = self._stream.read(_COPY_BYTES)

    def _cut(self, offset: int) -> CorruptInput:
        return self._corrupt(offset, "but it ends there, inside a member or without its end mark")

    def _corrupt(self, offset: int, found: str) -> CorruptInput:
        return CorruptInput(self._location, offset, expected="a whole tar", found=found)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK
