"""Anonymous files (memfd) as memory that two processes may share, page-locked where the system lets us."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import resource
import threading
from pathlib import Path
from typing import Final

_MAP_LOCKED: Final = 0x2000  # of Linux; `mmap` does not name it
_LOG = logging.getLogger(__name__)
_told = threading.Event()


def new_file(name: str) -> int:
    """The descriptor of an anonymous file that may grow and never shrink: who else maps it can rely on its pages."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def opened(pid: int, descriptor: int, num_bytes: int, *, writable: bool = False) -> int | None:
    """A descriptor of our own for what another process of this user has as `descriptor`; None where that is no file of
    `new_file` of at least `num_bytes`. Raises OSError where the process is gone.
    """
    file = os.open(f"/proc/{pid}/fd/{descriptor}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    own = Path(f"/proc/self/fd/{file}")  # of what was opened, also when the process is gone by now
    try:
        is_ours = str(own.readlink()).startswith("/memfd:") and os.fstat(file).st_size >= num_bytes
        if is_ours and fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return file
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def mapped(descriptor: int, num_bytes: int, protection: int = mmap.PROT_READ) -> mmap.mmap:
    """The first `num_bytes` (at least one) of an anonymous file, shared; page-locked within RLIMIT_MEMLOCK, else told
    once to the log and swappable. Raises OSError.
    """
    length = max(1, num_bytes)
    try:
        return mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED | _MAP_LOCKED, prot=protection)
    except (BlockingIOError, PermissionError):  # beyond the limit; none at all
        _tell_limit(length)
    return mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED, prot=protection)


def _tell_limit(num_bytes: int) -> None:
    if not _told.is_set():
        _told.set()
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        _LOG.warning(
            "%d bytes of a step in memory are not page-locked, so the system may swap them out: RLIMIT_MEMLOCK is %d "
            "bytes in all (in a systemd unit: LimitMEMLOCK=infinity)",
            num_bytes,
            limit,
        )
