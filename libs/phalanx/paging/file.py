"""An anonymous file on a local disk: it has no name, so the system frees it with the process, however that ends.

All its space is allocated when it is made: a disk that is too small is told then, not at a write. Access goes past the
page cache (O_DIRECT) where the file system has that, so that the memory used is the caller's buffers; elsewhere pages
are dropped behind the reads, and `settle` has the system tell of writes that it could not finish.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
import weakref
from pathlib import Path
from typing import Final

from phalanx.core.errors import OutsideError, PhalanxError

LOG = logging.getLogger(__name__)
_KEY: Final = "optimizer.offload_folder"
_NOT_OFFERED: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


class DiskError(OutsideError):
    """The disk refused a read or a write."""


class PageFile:
    """`num_bytes` of zeros in a new file in `folder`, which is made where it is missing. Offsets and lengths are
    multiples of 4096, and buffers begin at one.

    Raises PhalanxError where the folder can't be used, DiskError where its disk lacks the space.
    """

    def __init__(self, folder: Path, num_bytes: int, *, direct: bool = True) -> None:
        self.folder, self.num_bytes = folder, num_bytes
        self.fd = _unnamed(folder)
        self._close = weakref.finalize(self, os.close, self.fd)
        try:
            if num_bytes:
                _allocate(self.fd, num_bytes)
        except OSError as error:
            self.close()
            raise _failed(f"allocate {num_bytes:,} bytes", folder, error) from error
        self.is_direct = direct and _set_direct(self.fd)
        if not self.is_direct:
            LOG.info("%s: the file system has no direct access: pages of the file pass the page cache", folder)

    def read(self, offset: int, memory: memoryview) -> None:
        """Fills `memory` with the bytes from `offset` on. Raises DiskError."""
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self.fd, [memory[done:]], offset + done)
            except OSError as error:
                raise _failed(f"read {len(memory):,} bytes", self.folder, error) from error
            if not count:
                raise DiskError(f"{self.folder}: the file of the optimizer state ends at byte {offset + done:,}")
            done += count
        if not self.is_direct:
            os.posix_fadvise(self.fd, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def write(self, offset: int, memory: memoryview) -> None:
        """Puts `memory` at `offset`. Raises DiskError."""
        done = 0
        while done < len(memory):
            try:
                done += os.pwritev(self.fd, [memory[done:]], offset + done)
            except OSError as error:
                raise _failed(f"write {len(memory):,} bytes", self.folder, error) from error

    def settle(self) -> None:
        """Call it behind the writes of an update: raises DiskError for one that failed after it was taken, which only
        the page cache does.
        """
        if self.is_direct:
            return
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise _failed("write back pages", self.folder, error) from error

    def close(self) -> None:
        """Frees the file."""
        self._close()


def _unnamed(folder: Path) -> int:
    """A new file without a name. On a file system without O_TMPFILE its name is removed at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
        fd, name = tempfile.mkstemp(prefix="phalanx-pages-", dir=folder)
        Path(name).unlink()
        return fd
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EROFS):
            raise _failed("make a file", folder, error) from error
        raise PhalanxError(
            _KEY,
            value=str(folder),
            expected=f"a folder in which a file can be made ({error.strerror})",
            remedy="name another one, on a local disk",
        ) from error


def _allocate(fd: int, num_bytes: int) -> None:
    """Asked first: a file system may fill itself up before it says that the space is not there."""
    found = os.fstatvfs(fd)
    if num_bytes > found.f_bavail * found.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(fd, 0, num_bytes)


def _set_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _failed(what: str, folder: Path, error: OSError) -> DiskError:
    return DiskError(f"{folder}: the disk of the optimizer state did not {what}: {os.strerror(error.errno or 0)}")
