"""MosaicML's MDS: `index.json` names the shards; a shard holds samples of several columns.

A shard is `samples` uint32, `offsets` uint32 [samples + 1] (bytes from the shard's start), a header in JSON that
nobody needs for reading, then the samples: the sizes of columns of no fixed size, uint32 each, then all columns. A
column `ndarray[:dtype[:shape]]` says in front of its values what the encoding leaves open: a byte for the type, a byte
(axes << 2 | log2 of the bytes of a length), the lengths. A shard may lie there compressed, and have digests.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.core.errors import PhalanxError
from phalanx.data.importing.errors import BadTokens, malformed, require_pyarrow
from phalanx.data.importing.files import Files
from phalanx.data.importing.options import TOKEN_COLUMNS, Understanding
from phalanx.data.importing.rows import Rows, gathered

INDEX = "index.json"
_VERSION = 2
_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_HEAD_SAMPLES = 16  # read at a time where only the next document's end is looked for
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class MdsPiece:
    """One shard. path: the file that is there, compressed by `compression` ("": it is the shard itself).

    row_path: what rows are called by. sizes: bytes of each column, 0 where they differ; token, id: numbers of columns
    (id -1: none). dtype: of ids in a column of plain bytes, else "".
    """

    kind: ClassVar[str] = "mds"
    path: str
    num_bytes: int
    stream: int
    row_path: str
    raw_bytes: int
    compression: str
    hashes: Mapping[str, str]
    raw_hashes: Mapping[str, str]
    samples: int
    encodings: Sequence[str]
    sizes: Sequence[int]
    token: int
    id: int
    dtype: str

    def rows(self, files: Files, *, is_head: bool) -> Iterator[Rows]:
        """All rows, in order. is_head: only the first few may be asked for, so they are read one by one."""
        where, source = files.shown(self.path), files.open(self.path, self.num_bytes)
        if is_head and not self.compression:
            yield from self._rows(where, source.range, _HEAD_SAMPLES)
            return
        data = source.whole()
        _check_hashes(where, data, self.hashes)
        if self.compression:
            data = _decompressed(where, data, self.compression, self.raw_bytes)
            _check_hashes(where, data, self.raw_hashes)
        yield from self._rows(where, lambda start, stop: data[start:stop], self.samples)

    def _rows(self, where: str, read: Callable[[int, int], bytes], at_once: int) -> Iterator[Rows]:
        samples = self._samples(where, read, at_once)
        yield from gathered(self.row_path, (self._row(where, number, sample) for number, sample in samples))

    def _samples(self, where: str, read: Callable[[int, int], bytes], at_once: int) -> Iterator[tuple[int, bytes]]:
        head = np.frombuffer(read(0, 4 * (self.samples + 2)), "<u4").astype(np.int64)
        offsets = head[1:]
        if head[0] != self.samples:
            raise malformed(where, f"{self.samples} samples, as {INDEX} has it", f"the shard has {head[0]}")
        if (np.diff(offsets) < 0).any() or offsets[0] < 4 * len(head) or offsets[-1] != self.raw_bytes:
            raise malformed(where, "samples that lie one behind the other to the shard's end", "its offsets differ")
        places = offsets.tolist()
        for first in range(0, self.samples, at_once):
            bounds = places[first : first + at_once + 1]
            data = read(bounds[0], bounds[-1])
            for number, (start, stop) in enumerate(itertools.pairwise(bounds), start=first):
                yield number, data[start - bounds[0] : stop - bounds[0]]

    def _row(self, where: str, number: int, sample: bytes) -> tuple[NDArray[np.integer], str | None, int]:
        num_open = sum(not size for size in self.sizes)
        if len(sample) < 4 * num_open:
            raise malformed(f"{where}, row {number}", "a sample with its columns' sizes", f"it has {len(sample)} bytes")
        sizes = iter(np.frombuffer(sample, "<u4", num_open).tolist())
        bounds = [4 * num_open]
        for size in self.sizes:
            bounds.append(bounds[-1] + (size or next(sizes)))
        if bounds[-1] != len(sample):
            raise malformed(f"{where}, row {number}", "columns that fill the sample", "their sizes differ")
        value = sample[bounds[self.token] : bounds[self.token + 1]]
        tokens = _values(f"{where}, row {number}", value, self.encodings[self.token], self.dtype)
        return tokens, self._id(where, number, sample, bounds), len(sample)

    def _id(self, where: str, number: int, sample: bytes, bounds: Sequence[int]) -> str | None:
        if self.id < 0:
            return None
        value, encoding = sample[bounds[self.id] : bounds[self.id + 1]], self.encodings[self.id]
        if encoding in ("str", "str_int"):
            return value.decode(errors="backslashreplace")
        return str(np.frombuffer(value, "int64" if encoding == "int" else encoding)[0])


def mds_pieces(files: Files, folder: str, stream: int, how: Understanding) -> list[MdsPiece]:
    """The shards that `folder`/index.json names, in its order.

    Raises BadTokens for an index that is none, of another version, or without a column of ids, and for shards that are
    missing or of another size; PhalanxError for a dtype that no shard needs.
    """
    index_path = f"{folder}/{INDEX}" if folder else INDEX
    where = files.shown(index_path)
    shards = _shards(where, files.open(index_path, files.existing_size(index_path)).whole())
    pieces = files.each(lambda shard: _piece(files, where, folder, stream, how, shard), shards)
    if how.dtype is not None and pieces and not any(piece.dtype for piece in pieces):
        column = f"a column of ids encoded as bytes with it, not {pieces[0].encodings[pieces[0].token]}"
        raise PhalanxError(
            "--dtype", value=how.dtype, expected=column, remedy="leave it out: the values say their type"
        )
    return pieces


def shard_paths(index: bytes, prefix: str) -> set[str]:
    """Every file that an `index.json` names, packed or not, below `prefix`; none where it is broken."""
    try:
        found = json.loads(index)["shards"]
        entries = [shard[kind] for shard in found for kind in ("raw_data", "zip_data") if shard.get(kind)]
        return {f"{prefix}{entry['basename']}" for entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()


def is_mds_index(data: bytes) -> bool:
    """Whether an `index.json` is one of MDS."""
    try:
        found = json.loads(data)
    except ValueError:
        return False
    return isinstance(found, dict) and isinstance(found.get("shards"), list)


def _shards(where: str, data: bytes) -> list[dict[str, Any]]:
    try:
        found = json.loads(data)
        version, shards = found["version"], [dict(shard) for shard in found["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise malformed(where, "an index of MDS shards", f"it is none ({error!r})") from error
    if version != _VERSION or any(shard.get("version", _VERSION) != _VERSION for shard in shards):
        raise malformed(where, f"version {_VERSION}", f"it has {version!r}")
    formats = {str(shard.get("format")) for shard in shards} - {"mds"}
    if formats:
        raise malformed(where, "shards of format 'mds'", f"it has {sorted(formats)}")
    return shards


@dataclass(frozen=True, slots=True)
class _File:
    """A file as the index has it."""

    path: str
    num_bytes: int
    hashes: Mapping[str, str]

    @staticmethod
    def of(folder: str, entry: Mapping[str, Any]) -> _File:
        name = str(entry["basename"])
        hashes = {str(kind): str(digest) for kind, digest in dict(entry.get("hashes") or {}).items()}
        return _File(f"{folder}/{name}" if folder else name, int(entry["bytes"]), hashes)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A shard as the index has it. packed: its compressed file, where there is one."""

    names: list[str]
    encodings: list[str]
    sizes: list[int]
    samples: int
    compression: str
    raw: _File
    packed: _File | None

    @staticmethod
    def of(where: str, folder: str, shard: Mapping[str, Any]) -> _Entry:
        """Raises BadTokens for an entry that makes no sense."""
        try:
            entry = _Entry(
                [str(name) for name in shard["column_names"]],
                [str(encoding) for encoding in shard["column_encodings"]],
                [int(size or 0) for size in shard["column_sizes"]],
                int(shard["samples"]),
                str(shard.get("compression") or "").split(":")[0],
                _File.of(folder, shard["raw_data"]),
                _File.of(folder, shard["zip_data"]) if shard.get("zip_data") else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise malformed(where, "an index of MDS shards", f"an entry is broken ({error!r})") from error
        numbers = (entry.samples, entry.raw.num_bytes, *entry.sizes)
        if (
            min(numbers) < 0
            or max(numbers) >= 1 << 32
            or not len(entry.names) == len(entry.encodings) == len(entry.sizes)
        ):
            raise malformed(where, "an index of MDS shards", "an entry is broken (its numbers make no sense)")
        return entry


def _piece(
    files: Files, where: str, folder: str, stream: int, how: Understanding, shard: Mapping[str, Any]
) -> MdsPiece:
    entry = _Entry.of(where, folder, shard)
    names, encodings, raw = entry.names, entry.encodings, entry.raw
    token = _token_column(where, names, encodings, how.column)
    there = raw
    if entry.packed is not None and (files.size(entry.packed.path) is not None or files.size(raw.path) is None):
        there = entry.packed
    found = files.existing_size(there.path)
    if found != there.num_bytes:
        raise malformed(files.shown(there.path), f"{there.num_bytes} bytes, as {INDEX} has it", f"it has {found}")
    is_packed = there is not raw
    return MdsPiece(
        path=there.path,
        num_bytes=there.num_bytes,
        stream=stream,
        row_path=raw.path,
        raw_bytes=raw.num_bytes,
        compression=entry.compression if is_packed else "",
        hashes=there.hashes,
        raw_hashes=raw.hashes if is_packed else {},
        samples=entry.samples,
        encodings=encodings,
        sizes=entry.sizes,
        token=token,
        id=-1 if how.id_column is None else _id_column(where, names, encodings, how.id_column),
        dtype=how.required_dtype(f"{where}, column {names[token]!r}") if encodings[token] == "bytes" else "",
    )


def _token_column(where: str, names: Sequence[str], encodings: Sequence[str], given: str | None) -> int:
    """The number of the column that holds ids: the given one, else the only one that can."""
    able = [
        name for name, encoding in zip(names, encodings, strict=True) if encoding.split(":")[0] in ("ndarray", "bytes")
    ]
    known = [name for name in TOKEN_COLUMNS if name in able]
    chosen = given if given is not None else (known or able or [""])[0]
    columns = ", ".join(f"{name} ({encoding})" for name, encoding in zip(names, encodings, strict=True))
    if chosen not in able or (given is None and not known and len(able) > 1):
        raise PhalanxError(
            where,
            value=given,
            expected="one column of ids, encoded as ndarray or bytes",
            remedy=f"name it with --column; it has {columns}",
        )
    return names.index(chosen)


def _id_column(where: str, names: Sequence[str], encodings: Sequence[str], given: str) -> int:
    able = {"str", "str_int", "int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    if given not in names or encodings[names.index(given)] not in able:
        raise PhalanxError(
            where,
            value=given,
            expected="a column of strings or integers for --id-column",
            remedy=f"it has {', '.join(map(' '.join, zip(names, encodings, strict=True)))}",
        )
    return names.index(given)


def _values(where: str, data: bytes, encoding: str, dtype: str) -> NDArray[np.integer]:
    """The ids of one value of a column."""
    shape: tuple[int, ...] | None = None
    if encoding != "bytes":
        dtype, shape, data = _ndarray(where, data, encoding)
    kind = np.dtype(dtype)
    if len(data) % kind.itemsize or (shape is not None and int(np.prod(shape)) * kind.itemsize != len(data)):
        raise malformed(where, f"{kind.name} values of shape {shape}", f"it has {len(data)} bytes")
    if shape is not None and len(shape) != 1:
        raise BadTokens(where, expected="one row of ids", value=shape, remedy="arrays of more axes are no documents")
    return np.frombuffer(data, kind)


def _ndarray(where: str, data: bytes, encoding: str) -> tuple[str, tuple[int, ...], bytes]:
    """Type, shape and the bytes of the values."""
    _, _, config = encoding.partition(":")
    dtype, _, lengths = config.partition(":")
    try:
        if not dtype:
            dtype, data = _DTYPES[data[0]], data[1:]
        elif dtype not in _DTYPES.values():
            raise KeyError(dtype)
        if lengths:
            return dtype, tuple(int(length) for length in lengths.split(",")), data
        num_axes, length_bytes = data[0] >> 2, 1 << (data[0] & 3)
        stop = 1 + num_axes * length_bytes
        shape = np.frombuffer(data[1:stop], f"<u{length_bytes}", num_axes)
    except (IndexError, KeyError, ValueError) as error:
        raise malformed(where, f"a value encoded as {encoding}", f"it is cut or of another type ({error!r})") from error
    return dtype, tuple(shape.tolist()), data[stop:]


def _decompressed(where: str, data: bytes, compression: str, num_bytes: int) -> bytes:
    by_name = {"br": "brotli", "snappy": "snappy", "zstd": "zstd"}
    try:
        if compression == "gz":
            found = gzip.decompress(data)
        elif compression == "bz2":
            found = bz2.decompress(data)
        elif compression in by_name:
            require_pyarrow(where)
            import pyarrow as pa

            found = pa.decompress(data, num_bytes, by_name[compression], asbytes=True)
        else:
            raise malformed(where, "compression br, bz2, gz, snappy or zstd", f"it is {compression!r}")
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow's errors are among them
        raise malformed(where, f"a whole {compression} stream", f"it does not open ({error})") from error
    if len(found) != num_bytes:
        raise malformed(where, f"{num_bytes} bytes inside, as {INDEX} has it", f"it has {len(found)}")
    return found


def _check_hashes(where: str, data: bytes, hashes: Mapping[str, str]) -> None:
    """Raises BadTokens where a digest of the index is another; digests of a kind that is unknown here prove nothing."""
    for name, listed in hashes.items():
        if name in hashlib.algorithms_available and not name.startswith("shake_"):
            found = hashlib.new(name, data).hexdigest()
        elif name in xxhash.algorithms_available:
            found = getattr(xxhash, name)(data).hexdigest()
        else:
            raise malformed(where, "digests by hashlib or xxhash", f"{INDEX} has {name!r}")
        if found != listed:
            raise malformed(where, f"{name} {listed}, as {INDEX} has it", f"it has {found}")
