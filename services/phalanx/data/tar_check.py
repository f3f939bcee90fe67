"""One shard's tar against its index, in one pass and with one chunk in memory: what is damaged, and at which byte."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from phalanx.stream.layout import END, TAR_HEADER, TOKENS, Part
from phalanx.stream.shards import MalformedShard

CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Flaw:
    """A part of a tar that is not what it must be. member: None for the end; offset: bytes into the tar."""

    member: int | None
    offset: int
    what: str


class Chunks:
    """The bytes of an object, read once from its beginning, chunk by chunk. read: bytes by offset and length; observe:
    told how many bytes came. `digest` is that of all that was taken.
    """

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int, observe: Callable[[int], None]) -> None:
        self._read, self.num_bytes, self._observe = read, num_bytes, observe
        self._digest = xxhash.xxh3_128()
        self._chunk, self._at, self._next = memoryview(b""), 0, 0

    @property
    def digest(self) -> str:
        """As a manifest has it."""
        return f"xxh3:{self._digest.hexdigest()}"

    def take(self, count: int) -> Iterator[memoryview]:
        """The next `count` bytes in pieces, or as many as there are."""
        while count:
            if self._at == len(self._chunk) and not self._fill():
                return
            piece = self._chunk[self._at : self._at + count]
            self._at += len(piece)
            count -= len(piece)
            yield piece

    def rest(self) -> None:
        """Takes what is left."""
        while self._fill():
            pass

    def _fill(self) -> bool:
        wanted = min(CHUNK_BYTES, self.num_bytes - self._next)
        if wanted <= 0:
            return False
        self._chunk, self._at = memoryview(self._read(self._next, wanted)), 0
        self._next += wanted
        self._digest.update(self._chunk)
        self._observe(wanted)
        return True


def flaws_of(chunks: Chunks, parts: Iterator[Part]) -> Iterator[Flaw]:
    """What in a tar is not as `parts` say, in its order; takes the whole tar. A tar that is cut is one flaw, at the
    part in which it ends.
    """
    try:
        for part in parts:
            flaw = _cut(part, chunks.num_bytes) if part.stop > chunks.num_bytes else _flaw(part, chunks)
            if flaw is not None:
                yield flaw
            if part.stop > chunks.num_bytes:
                break
    except MalformedShard as error:
        yield Flaw(None, 0, str(error))
    chunks.rest()


def _flaw(part: Part, chunks: Chunks) -> Flaw | None:
    if part.expected is None:
        digest = xxhash.xxh3_64()
        for piece in chunks.take(part.stop - part.start):
            digest.update(piece)
        is_right = digest.intdigest() == part.xxh3
        return None if is_right else Flaw(part.member, part.start, "the tokens do not have their digest")
    found = b"".join(chunks.take(part.stop - part.start))
    return None if found == part.expected else Flaw(part.member, part.start, _difference(part, part.expected, found))


def _difference(part: Part, expected: bytes, found: bytes) -> str:
    first = part.start + next(k for k, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
    if part.what == TAR_HEADER:
        return f"no tar header at byte {part.start}: {_header_error(found)}"
    if part.what == END:
        return f"no tar header at byte {part.start}, and no end of the tar: byte {first} is not 0"
    return f"the {part.what} at byte {part.start} is not what the index gives, from byte {first} on"


def _header_error(found: bytes) -> str:
    try:
        info = tarfile.TarInfo.frombuf(found, "utf-8", "replace")
    except tarfile.HeaderError as error:
        return str(error)
    return f"that of another file, {info.name!r}"


def _cut(part: Part, num_bytes: int) -> Flaw:
    """The flaw of a tar that ends in, or before, a part."""
    if part.what == TAR_HEADER:
        what = f"no tar header at byte {part.start}: the tar is cut at byte {num_bytes}"
    elif part.what == TOKENS:
        what = f"the tokens are cut at byte {num_bytes}"
    elif part.what == END:
        what = f"the end of the tar is missing, it is cut at byte {num_bytes}"
    else:
        what = f"the {part.what} at byte {part.start} is cut at byte {num_bytes}"
    return Flaw(part.member, part.start, what)
