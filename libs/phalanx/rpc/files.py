"""Small files read with one clear line when they cannot be."""

from __future__ import annotations

from pathlib import Path

from phalanx.core.errors import PhalanxError


def read_bytes(path: Path, what: str, remedy: str) -> bytes:
    """The file's bytes; raises PhalanxError, which names `what` the file is, when it cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        why = error.strerror if isinstance(error, OSError) else error
        raise PhalanxError(str(path), expected=f"{what} ({why})", remedy=remedy) from error
