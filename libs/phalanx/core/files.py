"""Files written whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

SECRET, PUBLIC = 0o600, 0o644


def write_atomically(path: Path, data: bytes, mode: int = PUBLIC) -> None:
    """`path` holds `data`, with these permissions, from one moment to the next; its folder (0700) is made if missing.

    Killed half-way, the old content stays; a hidden temporary file may be left, as private as `mode` says.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _replace(path, data, mode)


def write_output(path: Path, data: bytes) -> None:
    """Writes a file that a user named. One that is there keeps its permissions and its links, and its content until the
    new one is whole; a device or a pipe is written to. Raises OSError, which names the file.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        found = None
    if found is not None and not stat.S_ISREG(found.st_mode):
        path.write_bytes(data)
        return
    try:
        _replace(path.resolve(), data, None if found is None else stat.S_IMODE(found.st_mode))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(path: Path, data: bytes, mode: int | None) -> None:
    """mode: None for what the process gives to a new file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(temporary, flags, 0o666 if mode is None else mode), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
