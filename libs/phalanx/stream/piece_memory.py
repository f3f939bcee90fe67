"""Memory for pieces: mapped from the system by itself and used again, never taken from the allocator.

The allocator keeps an arena for each thread. Pieces are received by several threads, have different sizes and are let
go in another order, so that holes stay in all arenas which fit none of the pieces that come next.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque

import numpy as np

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class PieceMemory:
    """Buffers of `buffer_bytes`; at most `most_idle` of them are kept while nobody has them. Safe to use from several
    threads.
    """

    def __init__(self, buffer_bytes: int, most_idle: int) -> None:
        assert buffer_bytes > 0
        self._buffer_bytes = buffer_bytes
        # Appended to by whichever thread drops a last view, inside a garbage collection too, so no lock may be needed.
        self._idle: deque[mmap.mmap] = deque(maxlen=most_idle)

    @property
    def num_idle(self) -> int:
        """Buffers that nobody has."""
        return len(self._idle)

    def take(self, num_bytes: int) -> memoryview:
        """Memory of `num_bytes`, more than 0, to write to, with anything in it. It is lent to another when the last
        view of it is gone; what is larger than a buffer then goes back to the system.
        """
        if num_bytes > self._buffer_bytes:
            return np.frombuffer(mmap.mmap(-1, num_bytes, _PRIVATE), np.uint8).data
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = mmap.mmap(-1, self._buffer_bytes, _PRIVATE)
        lent = np.frombuffer(buffer, np.uint8, num_bytes)
        weakref.finalize(lent, self._idle.append, buffer).atexit = False
        return lent.data
