"""Standard output that tells from all other failures when it takes nothing more: a full disk, a reader that is gone."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputLostError(OSError):
    """Nothing more can be written on standard output."""


class _Output(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLostError(error.errno, error.strerror) from error


def watch_output() -> None:
    """From here on a failed write on standard output raises OutputLostError."""
    old = sys.stdout
    if not isinstance(old, io.TextIOWrapper):
        return
    old.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(old.fileno(), "w", closefd=False)),
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )


def drop_output() -> None:
    """What standard output holds back, and all that follows, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
