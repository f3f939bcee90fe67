"""Small files written whole or not at all, and read with one clear line when they cannot be."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from phalanx.core.errors import PhalanxError

SECRET, PUBLIC = 0o600, 0o644


def write_atomically(path: Path, data: bytes, mode: int = PUBLIC) -> None:
    """`path` holds `data`, with these permissions, from one moment to the next; its folder (0700) is made if missing.

    Killed half-way, the old content stays; a hidden temporary file may be left, as private as `mode` says.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
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


def read_bytes(path: Path, what: str, remedy: str) -> bytes:
    """The file's bytes; raises PhalanxError, which names `what` the file is, when it cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        why = error.strerror if isinstance(error, OSError) else error
        raise PhalanxError(str(path), expected=f"{what} ({why})", remedy=remedy) from error
