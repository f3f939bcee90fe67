"""Paths, URLs and names as arguments: each is read by one of these parsers, which refuse what names nothing.

An empty path would otherwise be the current folder, and a text that no file can be called an error of the system's.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

import typer

_MOST_BYTES: Final = 4096  # PATH_MAX of Linux
_MOST_OF_A_NAME: Final = 255  # NAME_MAX of its file systems


def given(text: str) -> str:
    """`text`, which names a file, a folder, a URL or a job; typer names the argument in the error for what cannot."""
    if not text.strip():
        raise typer.BadParameter(f"{text!r} names nothing: expected a file, a folder, a URL or a job, as the help says")
    parts = [] if "://" in text else text.split("/")
    if len(os.fsencode(text)) > _MOST_BYTES or any(len(os.fsencode(part)) > _MOST_OF_A_NAME for part in parts):
        raise typer.BadParameter(
            f"{text[:40]!r}... ({len(text):,} characters) is too long: expected names of up to {_MOST_OF_A_NAME} "
            f"bytes, {_MOST_BYTES} in all"
        )
    error_number = _error_number(text.removeprefix("file://"))
    if error_number == errno.ELOOP:
        raise typer.BadParameter(
            f"{text!r} lies behind symbolic links that lead to each other: expected one that can be reached; "
            "remove one of the links"
        )
    if error_number == errno.EACCES:
        raise typer.BadParameter(
            f"{text!r} lies in a folder that this user may not look into: expected one that can be reached; "
            "change the folder's permissions"
        )
    if error_number == errno.ENAMETOOLONG:
        raise typer.BadParameter(
            f"{text[:40]!r}... ({len(text):,} characters) is too long for the file system that it lies on: expected "
            f"shorter names"
        )
    return text


def given_id(text: str) -> str:
    """`text`, which is a request's id or a new job's name; typer names the option in the error for what is none."""
    if not text.strip():
        raise typer.BadParameter(
            f"{text!r} names nothing: expected some characters; leave the option out to have one made"
        )
    return text


def _error_number(path: str) -> int | None:
    """What keeps the system from looking at a path; None where nothing does."""
    if "://" in path:
        return None
    try:
        Path(path).expanduser().stat()
    except OSError as error:
        return error.errno
    except RuntimeError:  # the home of a user that is not there
        return None
    return None


def given_path(text: str | Path) -> Path:
    """`text`, which names a file or folder of this machine; typer names the argument in the error for what cannot."""
    return Path(given(str(text)))
