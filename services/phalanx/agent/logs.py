"""Pieces of a rank's log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a log. offset: of the first of them. size: of the log, at the moment of reading."""

    data: bytes
    offset: int
    size: int


def read_chunk(path: Path, offset: int, max_bytes: int) -> Chunk:
    """At most `max_bytes` (0: MOST_BYTES, which is also the most) from `offset`, which counts from the end where it is
    negative; an offset past the end gives nothing. A log that is not there yet is empty.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = min(size, offset) if offset >= 0 else max(0, size + offset)
            file.seek(start)
            return Chunk(file.read(min(max_bytes or MOST_BYTES, MOST_BYTES)), start, size)
    except FileNotFoundError:
        return Chunk(b"", 0, 0)
