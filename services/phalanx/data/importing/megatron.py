"""Megatron's indexed datasets: `<prefix>.bin` holds token ids, `<prefix>.idx` says where sequences and documents lie.

The index: `MMIDIDX\\0\\0`, version uint64 (1), type uint8, number of sequences uint64, number of document entries
uint64; then of each sequence its length int32 and its byte offset in the .bin int64; the document entries int64 (a
document is the run of sequences from one entry to the next); and, in multimodal datasets, a mode int8 a sequence.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phalanx.data.importing.errors import BadTokens, malformed
from phalanx.data.importing.files import Files
from phalanx.data.importing.rows import BLOCK_TOKENS, Rows, groups_of
from phalanx.data.prepare.inputs.objects import InputObject
from phalanx.data.prepare.inputs.pieces import PIECE_BYTES

MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


@dataclass(frozen=True, slots=True)
class MegatronPiece:
    """A run of documents (of sequences where `by_sequence`): the rows [first, stop) of the dataset. path: the .bin."""

    kind: ClassVar[str] = "megatron"
    path: str
    num_bytes: int
    stream: int
    bin_bytes: int
    index_path: str
    index_bytes: int
    dtype: str
    sequences: int
    by_sequence: bool
    first: int
    stop: int

    def rows(self, files: Files, *, is_head: bool) -> Iterator[Rows]:
        """All rows, in order; is_head: in small blocks."""
        index = files.open(self.index_path, self.index_bytes)
        where = files.shown(self.index_path)
        bounds = np.arange(self.first, self.stop + 1)
        if not self.by_sequence:
            bounds = self._document_bounds(where, index)
        first = int(bounds[0])
        lengths, offsets = self._sequences(where, index, first, int(bounds[-1]))
        starts = np.concatenate([[0], np.cumsum(lengths)])[bounds - first]
        row_lengths, name = np.diff(starts), self.path.removesuffix(".bin")
        item, data = np.dtype(self.dtype).itemsize, files.open(self.path, self.bin_bytes)
        for begin, end in groups_of(row_lengths, BLOCK_TOKENS // 64 if is_head else BLOCK_TOKENS):
            here = slice(int(bounds[begin]) - first, int(bounds[end]) - first)
            tokens = np.frombuffer(_read(data, offsets[here], lengths[here] * item), self.dtype)
            yield Rows(name, self.first + begin, tokens, row_lengths[begin:end], tokens.nbytes)

    def _document_bounds(self, where: str, index: InputObject) -> NDArray[np.int64]:
        """The first sequence of each document of the piece, and the end of the last."""
        start = _HEAD.size + 12 * self.sequences
        bounds = _array(index, start + 8 * self.first, self.stop + 1 - self.first, "<i8")
        if (np.diff(bounds) < 0).any() or bounds[0] < 0 or bounds[-1] > self.sequences:
            raise malformed(where, "document entries in rising order", f"those from {self.first} on are not")
        return bounds

    def _sequences(
        self, where: str, index: InputObject, first: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lengths and byte offsets of the sequences [first, stop)."""
        lengths = _array(index, _HEAD.size + 4 * first, stop - first, "<i4")
        offsets = _array(index, _HEAD.size + 4 * self.sequences + 8 * first, stop - first, "<i8")
        ends = offsets + lengths * np.dtype(self.dtype).itemsize
        wrong = np.flatnonzero((lengths < 0) | (offsets < 0) | (ends > self.bin_bytes))
        if len(wrong):
            raise malformed(
                f"{where}, sequence {first + int(wrong[0])}",
                f"sequences inside the .bin of {self.bin_bytes} bytes",
                f"it ends at byte {int(ends[wrong[0]])}",
            )
        return lengths, offsets


def megatron_pieces(files: Files, path: str, stream: int, *, by_sequence: bool) -> list[MegatronPiece]:
    """The pieces of one dataset. path: its .bin, its .idx, or their common prefix.

    Raises BadTokens for an index that is none or of another version, for ids that are no integers, for a .bin or .idx
    of another size, and for sequences that belong to no document.
    """
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    where = files.shown(f"{prefix}.idx")
    bin_bytes, index_bytes = files.existing_size(f"{prefix}.bin"), files.existing_size(f"{prefix}.idx")
    index = files.open(f"{prefix}.idx", index_bytes)
    dtype, sequences, entries = _head(where, index)
    expected = _HEAD.size + 12 * sequences + 8 * entries
    if index_bytes not in (expected, expected + sequences):
        raise malformed(where, f"{expected} bytes for {sequences} sequences", f"it has {index_bytes}")
    _check_ends(where, index, dtype, sequences, bin_bytes)
    rows = sequences
    if not by_sequence:
        _check_documents(where, index, sequences, entries)
        rows = entries - 1
    at_once = max(1, -(-rows * PIECE_BYTES // max(bin_bytes, 1)))
    cuts = [*range(0, rows, at_once), rows]
    return [
        MegatronPiece(
            path=f"{prefix}.bin",
            num_bytes=bin_bytes * stop // rows - bin_bytes * first // rows,
            stream=stream,
            bin_bytes=bin_bytes,
            index_path=f"{prefix}.idx",
            index_bytes=index_bytes,
            dtype=dtype,
            sequences=sequences,
            by_sequence=by_sequence,
            first=first,
            stop=stop,
        )
        for first, stop in itertools.pairwise(cuts)
    ]


def _head(where: str, index: InputObject) -> tuple[str, int, int]:
    """Type of ids, number of sequences and of document entries."""
    data = index.range(0, min(_HEAD.size, index.num_bytes))
    if data.startswith(_OLD_MAGIC):
        raise malformed(where, "an index of Megatron-Core", "it is of the older TNTIDX kind")
    if not data.startswith(MAGIC) or len(data) < _HEAD.size:
        raise malformed(where, "an index of Megatron-Core", "it does not begin like one")
    _, version, code, sequences, entries = _HEAD.unpack(data)
    if version != 1:
        raise malformed(where, "an index of version 1", f"it has version {version}")
    dtype = _TYPES.get(code)
    if dtype is None or np.dtype(dtype).kind == "f":
        named = f"code {code}" if dtype is None else np.dtype(dtype).name
        raise BadTokens(where, value=named, expected="ids of an integer type", remedy="import ids, not numbers")
    return dtype, sequences, entries


def _check_ends(where: str, index: InputObject, dtype: str, sequences: int, bin_bytes: int) -> None:
    """Raises BadTokens where the last sequence does not end with the .bin."""
    end = 0
    if sequences:
        length = _array(index, _HEAD.size + 4 * (sequences - 1), 1, "<i4")
        offset = _array(index, _HEAD.size + 12 * sequences - 8, 1, "<i8")
        end = int(offset[0] + length[0] * np.dtype(dtype).itemsize)
    if end != bin_bytes:
        raise malformed(where, f"a last sequence that ends with the .bin of {bin_bytes} bytes", f"it ends at {end}")


def _check_documents(where: str, index: InputObject, sequences: int, entries: int) -> None:
    """Raises BadTokens where sequences belong to no document."""
    start = _HEAD.size + 12 * sequences
    first, last = -1, -1
    if entries:
        first = int(_array(index, start, 1, "<i8")[0])
        last = int(_array(index, start + 8 * (entries - 1), 1, "<i8")[0])
    if entries < 2 or first != 0 or last != sequences:
        raise BadTokens(
            where,
            expected=f"documents that cover all {sequences} sequences, its {entries} entries go from {first} to {last}",
            remedy="take each sequence as a document with --sequences",
        )


def _array(index: InputObject, start: int, count: int, dtype: str) -> NDArray[np.int64]:
    data = index.range(start, start + count * np.dtype(dtype).itemsize)
    return np.frombuffer(data, dtype).astype(np.int64)


def _read(data: InputObject, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
    """The sequences' bytes, in order; neighbours in the file are read at once."""
    if not len(sizes):
        return b""
    breaks = np.flatnonzero(offsets[1:] != offsets[:-1] + sizes[:-1]) + 1
    cuts = [0, *breaks.tolist(), len(sizes)]
    return b"".join(
        data.range(int(offsets[a]), int(offsets[b - 1] + sizes[b - 1])) for a, b in itertools.pairwise(cuts)
    )
