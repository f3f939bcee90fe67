"""Finds a key that occurs twice among very many, in 24 bytes a key."""

from __future__ import annotations

from array import array

import numpy as np
import xxhash


class KeyLog:
    """Keys with the offsets at which they were seen, held as hashes of 128 bits."""

    def __init__(self) -> None:
        self._hashes, self._offsets = bytearray(), array("Q")

    def add(self, key: str, offset: int) -> None:
        """Notes that `key` is at `offset`."""
        self._hashes += xxhash.xxh3_128_digest(key.encode(errors="surrogateescape"))
        self._offsets.append(offset)

    def first_repeated(self) -> tuple[int, int] | None:
        """Two offsets of one key, the earliest second one; None where all keys differ."""
        if not self._offsets:
            return None
        halves = np.frombuffer(self._hashes, np.uint64).reshape(-1, 2)
        order = np.lexsort((np.arange(len(halves)), halves[:, 0], halves[:, 1]))
        same = (halves[order[1:]] == halves[order[:-1]]).all(axis=1)
        if not same.any():
            return None
        seconds, firsts = order[1:][same], order[:-1][same]
        earliest = int(np.argmin(seconds))
        return self._offsets[firsts[earliest]], self._offsets[seconds[earliest]]
