"""What every byte of a shard's tar must be, by its index: all of it but the tokens is written out here, and those have
digests. So whatever is damaged is found where it is, and not only that something is. Pure.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.stream.shards import BLOCK_BYTES, END_BYTES, MalformedShard, ShardIndex, file_header

TAR_HEADER, NPY_HEADER, TOKENS, BOUNDS, PADDING, END = "tar header", "npy header", "tokens", "bounds", "padding", "end"
_BOUNDS_DTYPE = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [start, stop) of a tar. expected: what they are; None for tokens, whose XXH3-64 is `xxh3`. member: None for
    the end.
    """

    what: str
    member: int | None
    start: int
    stop: int
    expected: bytes | None
    xxh3: int = 0


def parts_of(name: str, index: ShardIndex, dtype: np.dtype[np.unsignedinteger]) -> Iterator[Part]:
    """The whole tar of the shard `name`, part by part without a gap. Raises MalformedShard where the index gives a
    member another place than it must have.
    """
    at = 0
    firsts, sizes = index.member_first_documents(), index.member_tokens()
    for member in range(index.num_members):
        key = f"{name}-{member:06d}"
        lengths = index.lengths[firsts[member] : firsts[member + 1]]
        bounds = np.cumsum(lengths, dtype=np.int64).astype(_BOUNDS_DTYPE).tobytes()
        count, offset = int(sizes[member]), int(index.member_offsets[member])
        at = yield from _header(f"{key}.tokens.npy", dtype, count, member, at)
        if at != offset:
            raise MalformedShard(f"the index puts the tokens of member {member} at byte {offset}, not {at}")
        stop = at + count * dtype.itemsize
        yield Part(TOKENS, member, at, stop, None, int(index.member_xxh3[member]))
        at = yield from _padding(member, stop)
        at = yield from _header(f"{key}.bounds.npy", _BOUNDS_DTYPE, len(lengths), member, at)
        yield Part(BOUNDS, member, at, at + len(bounds), bounds)
        at = yield from _padding(member, at + len(bounds))
    yield Part(END, None, at, at + END_BYTES, bytes(END_BYTES))


def _header(
    name: str, dtype: np.dtype[np.unsignedinteger], count: int, member: int, at: int
) -> Generator[Part, None, int]:
    """The two headers of a file; returns the byte behind them."""
    header = file_header(name, dtype, count)
    middle, stop = at + BLOCK_BYTES, at + len(header)
    yield Part(TAR_HEADER, member, at, middle, header[:BLOCK_BYTES])
    yield Part(NPY_HEADER, member, middle, stop, header[BLOCK_BYTES:])
    return stop


def _padding(member: int, at: int) -> Generator[Part, None, int]:
    """What fills the last block of a file; returns the byte behind it."""
    missing = -at % BLOCK_BYTES
    if missing:
        yield Part(PADDING, member, at, at + missing, bytes(missing))
    return at + missing
