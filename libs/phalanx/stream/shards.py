"""The shard format: a tar that any WebDataset reader opens, and the length index beside it.

One sample of the tar is one *member*, a pair of files: `<shard>-<k>.tokens.npy` (all tokens of many documents, uint16
or uint32, little endian) and `<shard>-<k>.bounds.npy` (uint32, the end of each document as a token offset inside the
member). A file's data starts on a 512-byte border and a .npy header fills a multiple of 64 bytes, so token data lies
64-byte aligned and a mapped shard gives arrays without a copy. The tar ends with its two zero blocks and nothing else.
Every byte follows from the documents: no time, no user, no host.

The index `<shard>.index.safetensors` says where everything lies, so a reader fetches a member by one ranged read and
checks it alone: `lengths` (tokens of each document), `member_documents`, `member_offsets` (byte offset of a member's
token data in the tar) and `member_xxh3` (XXH3-64 of those bytes).
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import safetensors.numpy
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError

from phalanx.core.errors import PhalanxError

BLOCK_BYTES = 512
END_BYTES = 2 * BLOCK_BYTES
DEFAULT_MEMBER_BYTES = 1 << 20
MAX_DOCUMENT_TOKENS = (1 << 31) - 1

_INDEX_DTYPES = {"lengths": "uint32", "member_documents": "uint32", "member_offsets": "uint64", "member_xxh3": "uint64"}


class MalformedShard(Exception):
    """A tar or index that breaks the format; the message names the offsets. Callers turn it into damage or a user's
    error.
    """


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Stored type of a token: little-endian uint16 where every id fits, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """Length index of one shard: lengths uint32 [documents]; member_documents uint32, member_offsets and member_xxh3
    uint64 [members].
    """

    lengths: NDArray[np.uint32]
    member_documents: NDArray[np.uint32]
    member_offsets: NDArray[np.uint64]
    member_xxh3: NDArray[np.uint64]

    @property
    def num_members(self) -> int:
        """Members in the shard."""
        return len(self.member_documents)

    def member_first_documents(self) -> NDArray[np.int64]:
        """First document of each member, and the number of documents at the end, int64 [members + 1]."""
        return np.concatenate([[0], np.cumsum(self.member_documents, dtype=np.int64)])

    def member_tokens(self) -> NDArray[np.int64]:
        """Tokens of each member, int64 [members]."""
        return np.add.reduceat(self.lengths.astype(np.int64), self.member_first_documents()[:-1])

    def encode(self) -> bytes:
        """The bytes of `<shard>.index.safetensors`."""
        return safetensors.numpy.save({name: getattr(self, name) for name in _INDEX_DTYPES})


def decode_index(data: bytes) -> ShardIndex:
    """Reads an index; raises MalformedShard where arrays are missing, of another type, or contradict each other."""
    try:
        arrays = safetensors.numpy.load(data)
    except SafetensorError as error:
        raise MalformedShard(f"not a safetensors file: {error}") from error
    if {name: str(array.dtype) for name, array in arrays.items()} != _INDEX_DTYPES:
        raise MalformedShard(f"index holds {sorted(arrays)}, expected {sorted(_INDEX_DTYPES)}")
    index = ShardIndex(**arrays)
    members = {len(index.member_documents), len(index.member_offsets), len(index.member_xxh3)}
    if len(members) != 1 or index.member_documents.sum() != len(index.lengths):
        raise MalformedShard("index arrays contradict each other")
    if not len(index.lengths) or not index.lengths.all() or not index.member_documents.all():
        raise MalformedShard("index has an empty document or an empty member")
    return index


@dataclass(frozen=True, slots=True, eq=False)
class BuiltShard:
    """One finished shard: the bytes of its tar, its index, and its document ids in order."""

    name: str
    tar: bytes
    index: ShardIndex
    document_ids: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the shard."""
        return int(self.index.lengths.sum(dtype=np.int64))


class ShardBuilder:
    """Collects documents into members and members into one tar, in memory.

    A member is closed before it would grow past `member_bytes` of token data; a document longer than that is a member
    of its own, so a document never spans two members.
    """

    def __init__(
        self, name: str, dtype: np.dtype[np.unsignedinteger], member_bytes: int = DEFAULT_MEMBER_BYTES
    ) -> None:
        assert "." not in name and "/" not in name, (
            f"a shard's name is the WebDataset key up to the first dot: {name!r}"
        )
        self.name, self._dtype, self._member_bytes = name, dtype, member_bytes
        self._tar = bytearray()
        self._pending: list[NDArray[np.unsignedinteger]] = []
        self._pending_tokens = 0
        self._lengths: list[int] = []
        self._ids: list[str] = []
        self._member_documents: list[int] = []
        self._member_offsets: list[int] = []
        self._member_xxh3: list[int] = []
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._ids)

    def add(self, document_id: str, tokens: NDArray[np.integer]) -> None:
        """Appends one document, tokens [length]; empty ones are the caller's to drop. Raises PhalanxError where it is
        too long to store.
        """
        assert len(tokens) > 0, f"document {document_id!r} has no token"
        if len(tokens) > MAX_DOCUMENT_TOKENS:
            raise PhalanxError(
                f"document {document_id!r}",
                value=len(tokens),
                expected=f"at most {MAX_DOCUMENT_TOKENS} tokens",
                remedy="split it",
            )
        if self._pending and (self._pending_tokens + len(tokens)) * self._dtype.itemsize > self._member_bytes:
            self._close_member()
        self._pending.append(tokens.astype(self._dtype, copy=False))
        self._pending_tokens += len(tokens)
        self._lengths.append(len(tokens))
        self._ids.append(document_id)
        self.num_tokens += len(tokens)

    def finish(self) -> BuiltShard:
        """Closes the tar and returns the shard; the builder is used up."""
        self._close_member()
        self._tar += bytes(END_BYTES)
        index = ShardIndex(
            np.array(self._lengths, dtype=np.uint32),
            np.array(self._member_documents, dtype=np.uint32),
            np.array(self._member_offsets, dtype=np.uint64),
            np.array(self._member_xxh3, dtype=np.uint64),
        )
        return BuiltShard(self.name, bytes(self._tar), index, tuple(self._ids))

    def _close_member(self) -> None:
        if not self._pending:
            return
        tokens = np.concatenate(self._pending)
        bounds = np.cumsum([len(document) for document in self._pending]).astype("<u4")
        key = f"{self.name}-{len(self._member_documents):06d}"
        self._member_documents.append(len(self._pending))
        self._member_offsets.append(self._append_array(f"{key}.tokens.npy", tokens))
        self._member_xxh3.append(xxhash.xxh3_64_intdigest(tokens.tobytes()))
        self._append_array(f"{key}.bounds.npy", bounds)
        self._pending, self._pending_tokens = [], 0

    def _append_array(self, name: str, array: NDArray[np.unsignedinteger]) -> int:
        """Appends one .npy file; returns the byte offset of its array data in the tar."""
        self._tar += file_header(name, array.dtype, len(array))
        offset = len(self._tar)
        assert offset % 64 == 0
        self._tar += array.tobytes()
        self._tar += bytes(-len(self._tar) % BLOCK_BYTES)
        return offset


def file_header(name: str, dtype: np.dtype[np.unsignedinteger], count: int) -> bytes:
    """What stands in a tar before the `count` numbers of one .npy file: its tar header and its .npy header."""
    header = _npy_header(dtype, count)
    info = tarfile.TarInfo(name)
    info.size = len(header) + count * dtype.itemsize
    return info.tobuf(format=tarfile.USTAR_FORMAT) + header


def _npy_header(dtype: np.dtype[np.unsignedinteger], count: int) -> bytes:
    """The 128-byte .npy header (format 1.0) of a 1-D array, written out here so that no release of numpy changes a
    dataset's bytes.
    """
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({count},), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One member as parsed from the tar itself. offset: byte offset of its token data."""

    key: str
    offset: int
    tokens: NDArray[np.unsignedinteger]
    bounds: NDArray[np.uint32]


def parse_shard(tar: bytes) -> Iterator[Member]:
    """Members of a tar by a strict reading of the tar alone (no index).

    Raises MalformedShard, with byte offsets, for a damaged or cut header, a missing end, a repeated name, a sample
    whose two files are not adjacent, or anything else that is not this format. Plain readers end quietly at most of
    these.
    """
    seen: dict[str, int] = {}
    files = _tar_files(tar)
    for name, start, size in files:
        if name in seen:
            raise MalformedShard(f"member {name!r} occurs twice, at bytes {seen[name]} and {start}")
        seen[name] = start
        key, _, extension = name.partition(".")
        if extension != "tokens.npy":
            other = seen.get(f"{key}.tokens.npy")
            why = f"its tokens lie at byte {other}, not adjacent" if other is not None else "no tokens before it"
            raise MalformedShard(f"member {name!r} at byte {start}: {why}")
        partner = next(files, None)
        if partner is None or partner[0] != f"{key}.bounds.npy":
            found = "the end" if partner is None else f"{partner[0]!r} at byte {partner[1]}"
            raise MalformedShard(f"member {name!r} at byte {start}: expected its bounds next to it, found {found}")
        seen[partner[0]] = partner[1]
        tokens, offset = _array_at(tar, name, start, size)
        bounds, _ = _array_at(tar, *partner)
        yield Member(key, offset, tokens, bounds)


def _tar_files(tar: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, byte offset of the data, size) of every file in a tar; raises MalformedShard at whatever is not a whole
    plain entry.
    """
    offset = 0
    while tar[offset : offset + END_BYTES] != bytes(END_BYTES):
        try:
            info = tarfile.TarInfo.frombuf(tar[offset : offset + BLOCK_BYTES], "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError) as error:
            raise MalformedShard(f"no tar header at byte {offset}: {error}") from error
        start = offset + BLOCK_BYTES
        if not info.isreg() or start + info.size > len(tar):
            raise MalformedShard(f"entry {info.name!r} at byte {offset} is cut or not a plain file")
        yield info.name, start, info.size
        offset = start + info.size + (-info.size % BLOCK_BYTES)
    if offset + END_BYTES != len(tar):
        raise MalformedShard(f"the tar ends at byte {offset} but {len(tar) - offset - END_BYTES} bytes follow")


def _array_at(tar: bytes, name: str, start: int, size: int) -> tuple[NDArray[np.unsignedinteger], int]:
    """The 1-D array of the .npy file at `start`, without a copy, and the byte offset of its data."""
    stream = io.BytesIO(tar[start : start + min(size, BLOCK_BYTES)])
    try:
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    except ValueError as error:
        raise MalformedShard(f"{name!r} at byte {start} is not a .npy file: {error}") from error
    offset = start + stream.tell()
    if len(shape) != 1 or dtype.kind != "u" or stream.tell() + shape[0] * dtype.itemsize != size:
        raise MalformedShard(
            f"{name!r} at byte {start} holds {dtype} {shape}, not one row of unsigned integers of {size} bytes"
        )
    return np.frombuffer(tar, dtype, shape[0], offset), offset
