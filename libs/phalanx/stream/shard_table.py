"""The shards of a split as columns: 72 bytes a shard, of which most stay on disk until they are asked for.

The columnar object is safetensors: `bytes`, `documents`, `tokens` int64 [num_shards], and three digests of 16 bytes
(XXH3 with 128 bits) `digests`, `index_digests`, `ids_digests` uint8 [num_shards, 16]. The wide columns come first, so
that each lies aligned in a mapped file and is used as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from phalanx.core.digest import xxh3
from phalanx.stream.shards import BuiltShard

COUNTS = ("bytes", "documents", "tokens")
DIGESTS = ("digests", "index_digests", "ids_digests")
DIGEST_BYTES = 16
_XXH3 = "xxh3:"
_Scalar = TypeVar("_Scalar", bound=np.generic)
_LENGTH_BYTES, _MAX_HEADER_BYTES = 8, 1 << 20


class MalformedTable(Exception):
    """Bytes that are no table of this format; says what is wrong."""


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard's row of the manifest."""

    name: str
    num_bytes: int
    num_documents: int
    num_tokens: int
    digest: str
    index_digest: str
    ids_digest: str

    @staticmethod
    def of(built: BuiltShard, index: bytes, ids: bytes) -> ShardEntry:
        """The row of a shard with the bytes of its index and of its list of ids."""
        counts = len(built.tar), len(built.document_ids), built.num_tokens
        return ShardEntry(built.name, *counts, xxh3(built.tar), xxh3(index), xxh3(ids))


@dataclass(frozen=True, slots=True)
class NumberedNames(Sequence[str]):
    """Names by rule: prefix and the shard's number, from 0, in at least `digits` digits."""

    prefix: str
    digits: int
    size: int

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[str]: ...
    def __getitem__(self, number: int | slice) -> str | Sequence[str]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(self.size))]
        if not -self.size <= number < self.size:
            raise IndexError(number)
        return f"{self.prefix}{number % self.size:0{self.digits}d}"

    def index(self, name: object, start: int = 0, stop: int | None = None) -> int:
        """The number of a name; raises ValueError where there is none."""
        digits = str(name).removeprefix(self.prefix)
        is_number = digits.isascii() and digits.isdigit() and len(digits) <= len(str(self.size)) + self.digits
        number = int(digits) if is_number else self.size
        if start <= number < (self.size if stop is None else min(stop, self.size)) and self[number] == name:
            return number
        raise ValueError(name)

    def __contains__(self, name: object) -> bool:
        try:
            self.index(name)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """names, num_bytes (of the tar), num_documents, num_tokens: one a shard, int64 [num_shards]; digests of tar, index
    and ids: uint8 [num_shards, 16].
    """

    names: Sequence[str]
    num_bytes: NDArray[np.int64]
    num_documents: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    digests: NDArray[np.uint8]
    index_digests: NDArray[np.uint8]
    ids_digests: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.names)

    def row(self, number: int) -> ShardEntry:
        """The row of shard `number`."""
        return ShardEntry(
            self.names[number],
            int(self.num_bytes[number]),
            int(self.num_documents[number]),
            int(self.num_tokens[number]),
            _digest(self.digests[number]),
            _digest(self.index_digests[number]),
            _digest(self.ids_digests[number]),
        )

    def encode(self) -> bytes:
        """The bytes of the columnar object: equal columns, equal bytes."""
        counts = zip(COUNTS, (self.num_bytes, self.num_documents, self.num_tokens), strict=True)
        digests = zip(DIGESTS, (self.digests, self.index_digests, self.ids_digests), strict=True)
        columns = {name: np.ascontiguousarray(column) for name, column in (*counts, *digests)}
        return bytes(safetensors.numpy.save(columns))


def _digest(row: NDArray[np.uint8]) -> str:
    return _XXH3 + row.tobytes().hex()


def table_of(entries: Iterable[ShardEntry]) -> ShardTable:
    """The table of these rows."""
    rows = list(entries)
    return ShardTable(
        numbered_or_listed([row.name for row in rows]),
        np.array([row.num_bytes for row in rows], np.int64),
        np.array([row.num_documents for row in rows], np.int64),
        np.array([row.num_tokens for row in rows], np.int64),
        digest_column([row.digest for row in rows]),
        digest_column([row.index_digest for row in rows]),
        digest_column([row.ids_digest for row in rows]),
    )


def digest_column(digests: Sequence[str]) -> NDArray[np.uint8]:
    """Digests `xxh3:<32 hex digits>` as uint8 [n, 16]."""
    joined = bytes.fromhex("".join(digest.removeprefix(_XXH3) for digest in digests))
    return np.frombuffer(joined, np.uint8).reshape(len(digests), DIGEST_BYTES)


def digest_strings(column: NDArray[np.uint8]) -> list[str]:
    """The inverse of `digest_column`."""
    text = column.tobytes().hex()
    return [_XXH3 + text[first : first + 2 * DIGEST_BYTES] for first in range(0, len(text), 2 * DIGEST_BYTES)]


def numbered_or_listed(names: Sequence[str]) -> Sequence[str]:
    """The rule of names that follow one, else the names themselves."""
    if not names:
        return ()
    digits = len(names[0]) - len(names[0].rstrip("0123456789"))
    rule = NumberedNames(names[0][: len(names[0]) - digits], digits, len(names))
    return rule if digits and all(map(str.__eq__, rule, names)) else tuple(names)


def decode_table(data: bytes | memoryview, names: Sequence[str]) -> ShardTable:
    """The table in the bytes of a columnar object, without a copy; raises MalformedTable for any other content."""
    header, start = _header(data)
    header.pop("__metadata__", None)
    if set(header) != {*COUNTS, *DIGESTS}:
        raise MalformedTable(f"it has the columns {sorted(header)}")
    body, count = memoryview(data)[start:], len(names)
    num_bytes, documents, tokens = (
        _column(body, name, header[name], "I64", np.dtype(np.int64), (count,)) for name in COUNTS
    )
    tars, indices, ids = (
        _column(body, name, header[name], "U8", np.dtype(np.uint8), (count, DIGEST_BYTES)) for name in DIGESTS
    )
    return ShardTable(names, num_bytes, documents, tokens, tars, indices, ids)


def _header(data: bytes | memoryview) -> tuple[dict[str, object], int]:
    """The JSON of a safetensors file, and where its data begins."""
    num_bytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or not 0 < num_bytes <= min(_MAX_HEADER_BYTES, len(data) - _LENGTH_BYTES):
        raise MalformedTable("it is no safetensors file")
    try:
        header = json.loads(bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes]))
    except (ValueError, RecursionError) as error:
        raise MalformedTable(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise MalformedTable("its header is no object")
    return header, _LENGTH_BYTES + num_bytes


def _column(
    body: memoryview, name: str, found: object, stored: str, dtype: np.dtype[_Scalar], shape: tuple[int, ...]
) -> NDArray[_Scalar]:
    """One column, of which the header says `found`."""
    offsets = found.get("data_offsets") if isinstance(found, dict) else None
    if not isinstance(found, dict) or (found.get("dtype"), found.get("shape")) != (stored, list(shape)):
        raise MalformedTable(f"column {name} is not {stored} {list(shape)}")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(each) is int for each in offsets)):
        raise MalformedTable(f"column {name} has no place")
    first, last = offsets
    if not 0 <= first <= last <= len(body) or last - first != math.prod(shape) * dtype.itemsize:
        raise MalformedTable(f"column {name} lies at bytes {first} to {last} of {len(body)}")
    return np.frombuffer(body[first:last], dtype).reshape(shape)
