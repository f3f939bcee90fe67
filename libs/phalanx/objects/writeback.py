"""Has the kernel begin to write a file's new pages to the disk while more is appended, so that the fsync at its end
finds little left. A hint: nothing is promised before that fsync, and where the hint is not taken it alone does all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

STRIDE_BYTES = 16 << 20
_BEGIN = 2  # SYNC_FILE_RANGE_WRITE, sync_file_range(2): starts the writing, waits for none of it


class Writeback:
    """The hints for one file that is appended to."""

    def __init__(self, file: int) -> None:
        self._file, self._hinted_bytes, self._num_bytes = file, 0, 0

    def appended(self, num_bytes: int) -> None:
        """`num_bytes` more were written."""
        self._num_bytes += num_bytes
        new_bytes = self._num_bytes - self._hinted_bytes
        if new_bytes >= STRIDE_BYTES:
            _call()(self._file, self._hinted_bytes, new_bytes)
            self._hinted_bytes = self._num_bytes


@cache
def _call() -> Callable[[int, int, int], None]:
    """sync_file_range(2), or nothing where the system has none."""
    try:
        found = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return lambda file, start, num_bytes: None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return lambda file, start, num_bytes: found(file, start, num_bytes, _BEGIN)
