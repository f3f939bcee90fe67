"""Where torch.save put a tensor's bytes: each tensor in a `.distcp` file is a zip archive of its own, whose records are
stored as they are. Only the archive's ends are read; its pickle is taken as bytes, for `isolated`.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import Final

from phalanx.checkpoint.importing.source import read_bytes, unusable
from phalanx.objects import ObjectStore

_END_BYTES: Final = 8 << 10
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_SMALL: Final = 1 << 20  # nobody's pickle of one tensor is larger


@dataclass(frozen=True, slots=True)
class Item:
    """A saved tensor: bytes [start, start + num_bytes) of the file `key`."""

    key: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """pickle: says which elements of the storage the tensor is. data_start: byte of the file at which the storage
    begins; it has `data_bytes`. storage: its number in the archive.
    """

    pickle: bytes
    storage: str
    data_start: int
    data_bytes: int


def saved_tensor(store: ObjectStore, item: Item) -> SavedTensor:
    """Finds the records of a saved tensor. Raises PhalanxError for what is no archive of one tensor."""
    where = f"{store.url}/{item.key} at byte {item.start}"
    window = _Window(store, item)
    try:
        with zipfile.ZipFile(window) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            names = [name for name in records if name.startswith("data/")]
            if len(names) != 1 or "data.pkl" not in records:
                raise unusable(where, sorted(records), "one tensor with one storage, as torch.save writes it")
            order = _small(archive, records["byteorder"]) if "byteorder" in records else b"little"
            if order != b"little":
                raise unusable(where, order, "little-endian values")
            pickle, data = _small(archive, records["data.pkl"]), records[names[0]]
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, struct.error) as error:
        raise unusable(where, str(error), "a tensor as torch.save writes it") from error
    start = data.header_offset + _header_bytes(window, where, data.header_offset)
    stored = data.compress_type == zipfile.ZIP_STORED and data.file_size == data.compress_size
    if not stored or start + data.file_size > item.num_bytes:
        raise unusable(where, data.filename, "values stored as they are, inside the archive")
    return SavedTensor(pickle, names[0].removeprefix("data/"), item.start + start, data.file_size)


def saved_pickle(store: ObjectStore, item: Item) -> bytes:
    """The pickle of a saved value that is no tensor. Raises PhalanxError for what is no archive of one."""
    where = f"{store.url}/{item.key} at byte {item.start}"
    try:
        with zipfile.ZipFile(_Window(store, item)) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if "data.pkl" not in records or any(name.startswith("data/") for name in records):
                raise unusable(where, sorted(records), "one value, as torch.save writes it")
            return _small(archive, records["data.pkl"])
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, struct.error) as error:
        raise unusable(where, str(error), "a value as torch.save writes it") from error


def _small(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if max(info.file_size, info.compress_size) > _SMALL or info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} has {info.file_size} bytes")
    return archive.read(info)


def _header_bytes(window: _Window, where: str, offset: int) -> int:
    """Length of the header before a record, whose name and padding only it knows."""
    window.seek(offset)
    data = window.read(_LOCAL_HEADER.size)
    if len(data) < _LOCAL_HEADER.size or data[:4] != b"PK\x03\x04":
        raise unusable(where, None, "a header before the values")
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(data)
    return int(_LOCAL_HEADER.size + name_bytes + extra_bytes)


class _Window(io.RawIOBase):
    """An item as a file for zipfile: its two ends are read at once, anything else when it is asked for."""

    def __init__(self, store: ObjectStore, item: Item) -> None:
        self._store, self._item, self._at = store, item, 0
        tail = max(0, item.num_bytes - _END_BYTES)
        self._blocks = [(start, self._fetch(start, min(_END_BYTES, item.num_bytes - start))) for start in {0, tail}]

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._item.num_bytes}[whence]
        if base + offset < 0:
            raise ValueError("a position before its beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._item.num_bytes - self._at)
        length = left if size < 0 else min(size, left)
        if length > _SMALL:
            raise ValueError("a directory without end")
        data = self._known(self._at, length)
        self._at += length
        return data

    def _known(self, start: int, length: int) -> bytes:
        for first, block in self._blocks:
            if first <= start and start + length <= first + len(block):
                return block[start - first : start - first + length]
        return self._fetch(start, length)

    def _fetch(self, start: int, length: int) -> bytes:
        return read_bytes(self._store, self._item.key, self._item.start + start, length)
