"""The bytes of input files; a file that is not what the listing saw is named.

Files are compared with their listed size when they are opened, and with themselves when they have been read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare.inputs.errors import ChangedInput
from phalanx.data.prepare.inputs.pieces import Piece, Span

_BUFFER_BYTES = 2**20


def location_of(root: str, path: str) -> str:
    """The whole path or URL of a file below `root`; below an empty root lie whole paths and URLs."""
    return f"{root.rstrip('/')}/{path}" if root else path


def opened(root: str, piece: Piece) -> Iterator[tuple[Span, BinaryIO]]:
    """Each span with a stream of its file, at the byte before the span or at 0; it can be sought in for parquet.

    Raises ChangedInput, PhalanxError where a file may not be read, OutsideError where reading fails.
    """
    for span in piece.spans:
        with _open_local(location_of(root, span.path), span.num_bytes) as stream:
            stream.seek(max(span.start - 1, 0))
            yield span, stream


@contextmanager
def _open_local(path: str, num_bytes: int) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", buffering=_BUFFER_BYTES) as stream:  # noqa: PTH123 - a path that is no Unicode stays itself
            before = os.fstat(stream.fileno())
            _require_size(path, before.st_size, num_bytes)
            yield stream
            after = os.fstat(stream.fileno())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ChangedInput(path, "but it is gone") from error
    except PermissionError as error:
        raise PhalanxError(path, expected="a file this user may read", remedy="change its permissions") from error
    except OSError as error:
        raise OutsideError(f"{path}: {error.strerror or error}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ChangedInput(path, "but it was written to while it was read")


def _require_size(location: str, num_bytes: int, listed: int) -> None:
    if num_bytes != listed:
        raise ChangedInput(location, f"of {listed} bytes, but it has {num_bytes}")
