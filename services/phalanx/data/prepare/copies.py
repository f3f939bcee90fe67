"""Finds exact copies among very many documents by their digests; of equal ones the first stays.

Memory does not grow with the documents but for one bit each. Digests beyond what fits in memory go to files without a
name in the temporary folder (nothing is left of them after a kill), 256 of them, by the digest's first byte; then one
file after the other is sorted, in several passes by the second byte where it is large.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import OutsideError

_ROW = np.dtype([("low", "<u8"), ("high", "<u8"), ("number", "<u8")])
_FILES = 256
_IN_MEMORY = 1 << 21  # rows of 24 bytes
Rows = NDArray[np.void]


class CopyFinder:
    """A context manager. in_memory: documents whose digests are held in memory at once."""

    def __init__(self, in_memory: int = _IN_MEMORY) -> None:
        self._in_memory = in_memory
        self._rows: list[Rows] = []
        self._num_rows = 0
        self._num_documents = 0
        self._files: list[BinaryIO] = []
        self._open = ExitStack()

    def __enter__(self) -> CopyFinder:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, digests: NDArray[np.uint8]) -> None:
        """Takes the digests of the next documents, uint8 [documents, 16]."""
        rows = np.empty(len(digests), _ROW)
        halves = np.ascontiguousarray(digests).view("<u8").reshape(-1, 2)
        rows["low"], rows["high"] = halves[:, 0], halves[:, 1]
        rows["number"] = np.arange(self._num_documents, self._num_documents + len(digests))
        self._rows.append(rows)
        self._num_rows += len(rows)
        self._num_documents += len(rows)
        if self._num_rows > self._in_memory:
            self._spill()

    def copies(self) -> Bits:
        """Which documents are copies of an earlier one."""
        bits = Bits(self._num_documents)
        if not self._files:
            bits.set(_repeated(self._taken()))
            return bits
        self._spill()
        for file in self._files:
            for rows in self._passes(file):
                bits.set(_repeated(rows))
        return bits

    def _taken(self) -> Rows:
        rows, self._rows, self._num_rows = np.concatenate([np.empty(0, _ROW), *self._rows]), [], 0
        return rows

    def _spill(self) -> None:
        rows = self._taken()
        first = rows["low"] & 0xFF
        rows = rows[np.argsort(first, kind="stable")]
        bounds = np.searchsorted(np.sort(first), np.arange(_FILES + 1))
        try:
            if not self._files:
                self._files = [self._open.enter_context(_nameless_file()) for _ in range(_FILES)]
            for number, file in enumerate(self._files):
                file.write(rows[bounds[number] : bounds[number + 1]].tobytes())
        except OSError as error:
            raise OutsideError(
                f"{tempfile.gettempdir()}: digests of documents could not be kept there while copies are looked for "
                f"({error.strerror or error}); TMPDIR names another folder"
            ) from error

    def _passes(self, file: BinaryIO) -> Iterator[Rows]:
        """The rows of a file, those with one digest together."""
        file.flush()
        num_rows = file.tell() // _ROW.itemsize
        num_passes = min(-(-num_rows // self._in_memory), _FILES) or 1
        for number in range(num_passes):
            yield np.concatenate([np.empty(0, _ROW), *self._picked(file, number, num_passes)])

    def _picked(self, file: BinaryIO, number: int, num_passes: int) -> Iterator[Rows]:
        file.seek(0)
        while data := file.read(self._in_memory // 8 * _ROW.itemsize or _ROW.itemsize):
            rows = np.frombuffer(data, _ROW)
            yield rows[((rows["low"] >> np.uint64(8)) & np.uint64(0xFF)) * num_passes // _FILES == number]


def _nameless_file() -> BinaryIO:
    return cast(BinaryIO, tempfile.TemporaryFile())


class Bits:
    """One bit for each of `count` documents, all clear at first."""

    def __init__(self, count: int) -> None:
        self._bytes = np.zeros(-(-count // 8), np.uint8)

    def set(self, numbers: NDArray[np.integer]) -> None:
        """Sets the bits of these documents."""
        np.bitwise_or.at(self._bytes, (numbers >> 3).astype(np.int64), (1 << (numbers & 7)).astype(np.uint8))

    def range(self, start: int, stop: int) -> NDArray[np.bool_]:
        """The bits of documents [start, stop)."""
        first = start // 8
        bits = np.unpackbits(self._bytes[first : -(-stop // 8)], bitorder="little")
        return bits[start - first * 8 : stop - first * 8].astype(np.bool_)


def _repeated(rows: Rows) -> NDArray[np.int64]:
    """The numbers of all rows but the first of each digest; rows: in the order of their numbers."""
    order = np.lexsort((rows["low"], rows["high"]))
    rows = rows[order]
    same = (rows["low"][1:] == rows["low"][:-1]) & (rows["high"][1:] == rows["high"][:-1])
    return cast(NDArray[np.int64], rows["number"][1:][same].astype(np.int64))
