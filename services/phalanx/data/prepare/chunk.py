"""A chunk: what one piece of an input became, on its way into shards.

Pieces are made into chunks by any worker in any order; assembling goes over the chunks in order and is cheap. A chunk
is one create-only safetensors object, `chunks/<piece>-<part>.safetensors` (a piece is called by its number, or by a
name that follows from what it is), and the last of a piece (most have one
alone) ends in `.end.safetensors`: the listing alone says which pieces are finished. Equal pieces give equal bytes,
whoever makes them. Each array has its XXH3-64 in the metadata, so a part of a chunk can be fetched and checked alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from array import array as numbers
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError

from phalanx.core.digest import canonical_json
from phalanx.core.errors import PhalanxError
from phalanx.objects import ObjectInfo, ObjectStore

CHUNKS = "chunks"
DIGEST_BYTES = 16
KEPT = 1  # the bit in `flags` of what became a document; the n-th rule (from 0) has the bit 2 << n

_FORMAT = "phalanx.chunk/1"
_NAME = re.compile(r"(\d{8}|[0-9a-f]{32})-(\d{5})(\.end)?\.safetensors")
_DIGITS = 8
_META = "phalanx"
_ARRAYS = ("tokens", "lengths", "digests", "ids", "id_ends", "lines", "raw_bytes", "flags")
_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}
_HEAD_BYTES = 16 << 10
_MAX_RULES = 31
_MAX_EXAMPLES = 5  # of each rule


@dataclass(frozen=True, slots=True)
class Example:
    """A record to which a rule was applied: its number in the chunk, its id, and its line in the piece (0: the id is
    complete).
    """

    rule: str
    record: int
    id: str
    line: int = 0

    def full_id(self, path: str, lines_before: int) -> str:
        """The record's id; see `Chunk.document_ids`."""
        return f"{path}:{lines_before + self.line}" if self.line else self.id


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """tokens: uint16 or uint32, all documents one after the other, each with its end-of-text token.

    Of each document: lengths uint32 (tokens); digests uint8 [documents, 16]; ids uint8 (UTF-8, one after the other),
    which end at id_ends uint64; lines uint32: 0 where the id is complete, else the document is called by its line,
    counted from 1 at the start of the piece, and its id here is empty.
    Of each record read, dropped ones included: raw_bytes uint64; flags uint32, see KEPT and rule_names.
    num_lines: lines of the file `path` from the start of the piece to the end of this chunk (0 where ids are complete).
    examples: a few records of each rule.
    """

    tokens: NDArray[np.unsignedinteger]
    lengths: NDArray[np.uint32]
    digests: NDArray[np.uint8]
    ids: NDArray[np.uint8]
    id_ends: NDArray[np.uint64]
    lines: NDArray[np.uint32]
    raw_bytes: NDArray[np.uint64]
    flags: NDArray[np.uint32]
    rule_names: tuple[str, ...] = ()
    path: str = ""
    num_lines: int = 0
    examples: tuple[Example, ...] = ()

    @property
    def num_documents(self) -> int:
        """Documents in the chunk."""
        return len(self.lengths)

    def document_ids(self, lines_before: int = 0) -> list[str]:
        """The ids; lines_before: lines of the file that lie before the piece."""
        text, ends = self.ids.tobytes(), self.id_ends.tolist()
        ids = [text[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
        for number in np.flatnonzero(self.lines).tolist():
            ids[number] = f"{self.path}:{lines_before + int(self.lines[number])}"
        return ids

    def counts(self, first: int = 0, stop: int | None = None) -> Counter[str]:
        """How often each rule was applied to the records [first, stop)."""
        flags = self.flags[first:stop]
        return Counter(
            {name: int(np.count_nonzero(flags & (2 << number))) for number, name in enumerate(self.rule_names)}
        )

    def encode(self) -> bytes:
        """The bytes of the object."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        about = {
            "format": _FORMAT,
            "rules": list(self.rule_names),
            "path": self.path,
            "num_lines": self.num_lines,
            "examples": [[e.rule, e.record, e.id, e.line] for e in self.examples],
            "xxh3": {name: xxhash.xxh3_64_hexdigest(array.data) for name, array in arrays.items()},
        }
        return safetensors.numpy.save(arrays, {_META: canonical_json(about).decode()})


class ChunkBuilder:
    """Collects a chunk, record by record. dtype: of the tokens. path: of the file whose lines are counted."""

    def __init__(self, dtype: np.dtype[np.unsignedinteger], path: str = "") -> None:
        self._dtype, self._path = dtype, path
        self._tokens, self._digests, self._ids = bytearray(), bytearray(), bytearray()
        self._lengths, self._lines, self._flags = numbers("I"), numbers("I"), numbers("I")
        self._id_ends, self._raw_bytes = numbers("Q"), numbers("Q")
        self._bits: dict[str, int] = {}
        self._examples: list[Example] = []
        self._shown: Counter[str] = Counter()
        self.num_raw_bytes = 0
        self.num_tokens = 0

    def record(
        self,
        num_bytes: int,
        rules: Iterable[str] = (),
        *,
        is_kept: bool,
        record_id: str = "",
        line: int | None = None,
    ) -> None:
        """Notes a record read, `num_bytes` long as found, and the names of the rules that were applied to it; where it
        is kept, its document must be added, in the same order.
        """
        flags = KEPT if is_kept else 0
        for name in rules:
            flags |= self._bits.setdefault(name, 2 << len(self._bits))
            self._shown[name] += 1
            if self._shown[name] <= _MAX_EXAMPLES:
                self._examples.append(Example(name, len(self._flags), record_id, line or 0))
        assert len(self._bits) <= _MAX_RULES, self._bits
        self._raw_bytes.append(num_bytes)
        self._flags.append(flags)
        self.num_raw_bytes += num_bytes

    def add(
        self, document_id: str, tokens: NDArray[np.unsignedinteger], digest: bytes, line: int | None = None
    ) -> None:
        """Adds a document: tokens [length] with the end-of-text token, digest of its content (16 bytes), and its line
        in the piece instead of an id where it is called by its line.
        """
        assert len(digest) == DIGEST_BYTES and len(tokens), document_id
        self._ids += b"" if line else document_id.encode()
        self._id_ends.append(len(self._ids))
        self._lines.append(line or 0)
        self._digests += digest
        self._tokens += np.ascontiguousarray(tokens, self._dtype).data.cast("B")
        self._lengths.append(len(tokens))
        self.num_tokens += len(tokens)

    @property
    def num_records(self) -> int:
        """Records noted so far."""
        return len(self._flags)

    def finish(self, num_lines: int = 0) -> Chunk:
        """The chunk; the builder is used up."""
        flags = np.array(self._flags, np.uint32)
        assert np.count_nonzero(flags & KEPT) == len(self._lengths), "a kept record without its document"
        return Chunk(
            np.frombuffer(self._tokens, self._dtype),
            np.array(self._lengths, np.uint32),
            np.frombuffer(self._digests, np.uint8).reshape(-1, DIGEST_BYTES),
            np.frombuffer(self._ids, np.uint8),
            np.array(self._id_ends, np.uint64),
            np.array(self._lines, np.uint32),
            np.array(self._raw_bytes, np.uint64),
            flags,
            tuple(self._bits),
            self._path,
            num_lines,
            tuple(self._examples),
        )


def chunk_of_tokens(
    tokens: NDArray[np.unsignedinteger], lengths: NDArray[np.integer], ids: Sequence[str], num_bytes: int
) -> Chunk:
    """A chunk of documents that are tokens already: tokens [sum of lengths], ids one for each document.

    A document's digest is that of its tokens as little-endian uint32. num_bytes: raw bytes of the piece, counted with
    its first record.
    """
    assert len(lengths) == len(ids) and int(lengths.sum()) == len(tokens)
    names = [document_id.encode() for document_id in ids]
    raw_bytes = np.zeros(len(ids), np.uint64)
    raw_bytes[:1] = num_bytes
    return Chunk(
        tokens,
        lengths.astype(np.uint32),
        token_digests(tokens, lengths),
        np.frombuffer(b"".join(names), np.uint8),
        np.cumsum([len(name) for name in names]).astype(np.uint64),
        np.zeros(len(ids), np.uint32),
        raw_bytes,
        np.full(len(ids), KEPT, np.uint32),
    )


def token_digests(tokens: NDArray[np.unsignedinteger], lengths: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Digests of documents by their tokens as little-endian uint32, uint8 [documents, 16]."""
    data, digests, start = memoryview(tokens.astype("<u4").tobytes()), bytearray(), 0
    for stop in (np.cumsum(lengths, dtype=np.int64) * 4).tolist():
        digests += content_digest(data[start:stop])
        start = stop
    return np.frombuffer(bytes(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def content_digest(data: bytes | memoryview) -> bytes:
    """The first 16 bytes of the SHA-256 of a document's content."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def chunk_key(piece: int | str, part: int, *, is_last: bool) -> str:
    """Key of part `part` (from 0) of the chunks of a piece, by its number or its name (32 hexadecimal digits)."""
    name = f"{piece:08d}" if isinstance(piece, int) else piece
    return f"{CHUNKS}/{name}-{part:05d}{'.end' if is_last else ''}.safetensors"


@dataclass(frozen=True, slots=True)
class FoundChunks:
    """What a listing shows. finished: of each finished piece, its chunks in order; parts: of each unfinished one, the
    numbers of those that are there; keys: of all of them.
    """

    finished: Mapping[int, tuple[ObjectInfo, ...]]
    parts: Mapping[int, Collection[int]]
    keys: Collection[str] = ()


def find_chunks(out: ObjectStore, names: Mapping[str, int] | None = None) -> FoundChunks:
    """The chunks below `out`; foreign objects are passed over. names: numbers of pieces by name, where chunks have
    names.
    """
    parts: dict[int, dict[int, ObjectInfo]] = {}
    last: dict[int, int] = {}
    for found in out.list(f"{CHUNKS}/"):
        match = _NAME.fullmatch(found.key.removeprefix(f"{CHUNKS}/"))
        if match is None or (match[1] not in names if names is not None else len(match[1]) != _DIGITS):
            continue
        piece, part = int(match[1]) if names is None else names[match[1]], int(match[2])
        parts.setdefault(piece, {})[part] = found
        if match[3]:
            last[piece] = part
    finished = {
        piece: tuple(parts[piece][part] for part in range(end + 1))
        for piece, end in last.items()
        if parts[piece].keys() >= set(range(end + 1))
    }
    unfinished = {piece: set(there) for piece, there in parts.items() if piece not in finished}
    return FoundChunks(finished, unfinished, [found.key for there in parts.values() for found in there.values()])


def read_chunk(out: ObjectStore, key: str) -> Chunk:
    """A chunk, every array checked. Raises PhalanxError where it is damaged."""
    return decode_chunk(out.read(key), f"{out.url}/{key}")


def decode_chunk(data: bytes, where: str) -> Chunk:
    """The chunk of these bytes, every array checked. Raises PhalanxError, naming `where`, where they are damaged."""
    try:
        arrays = safetensors.numpy.load(data)
        header = _Header.parse(data[8 : 8 + _header_bytes(data)])
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error) as error:
        raise damaged(where, f"that is none ({error})") from error
    if set(arrays) != set(_ARRAYS):
        raise damaged(where, f"of {sorted(arrays)}")
    for name, array in arrays.items():
        header.check(where, name, array)
    about = header.about
    return Chunk(
        **arrays,
        rule_names=tuple(about["rules"]),
        path=about["path"],
        num_lines=about["num_lines"],
        examples=tuple(Example(*fields) for fields in about["examples"]),
    )


def read_arrays(out: ObjectStore, found: ObjectInfo, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Some arrays of a chunk, fetched and checked alone. Raises PhalanxError where they are damaged."""
    where = f"{out.url}/{found.key}"
    head = out.read(found.key, 0, min(_HEAD_BYTES, found.num_bytes))
    try:
        start = 8 + _header_bytes(head)
        if start > found.num_bytes:
            raise ValueError("it is cut short")
        if start > len(head):
            head = out.read(found.key, 0, start)
        header = _Header.parse(head[8:start])
        arrays = {name: header.array(name, out, found, start) for name in names}
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise damaged(where, f"that is none ({error})") from error
    for name, array in arrays.items():
        header.check(where, name, array)
    return arrays


@dataclass(frozen=True, slots=True)
class _Header:
    """A safetensors header. about: what `Chunk.encode` noted. tensors: dtype, shape and place of each array."""

    about: dict[str, Any]
    tensors: dict[str, Any]

    @staticmethod
    def parse(data: bytes) -> _Header:
        tensors = json.loads(data)
        about = json.loads(tensors.pop("__metadata__")[_META])
        if about["format"] != _FORMAT:
            raise ValueError(f"format {about['format']!r}")
        return _Header(about, tensors)

    def array(self, name: str, out: ObjectStore, found: ObjectInfo, start: int) -> NDArray[Any]:
        tensor = self.tensors[name]
        first, stop = tensor["data_offsets"]
        if start + stop > found.num_bytes:
            raise ValueError("it is cut short")
        data = out.read(found.key, start + first, stop - first) if stop > first else b""
        return np.frombuffer(data, _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])

    def check(self, where: str, name: str, array: NDArray[Any]) -> None:
        if xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).data) != self.about["xxh3"][name]:
            raise damaged(where, f"with other {name}")


def _header_bytes(data: bytes) -> int:
    return int(struct.unpack_from("<Q", data)[0])


def damaged(where: str, found: str) -> PhalanxError:
    """The error for a chunk that is not what was written."""
    return PhalanxError(
        where,
        expected=f"a chunk as it was written, found one {found}",
        remedy="delete it and start its part again, or the whole without --part: only this piece is made anew",
    )
