"""The files of a folder tree on a disk."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare.inputs.pieces import InputFile

LINKED_FOLDERS, BROKEN_LINKS, NO_FILES = "links to folders", "broken links", "pipes, sockets or devices"


def walk(
    root: str, left_out: Counter[str], may_hold: Callable[[str], bool] | None = None, *, sees_hidden: bool = False
) -> Iterator[InputFile]:
    """Every file below `root`, by relative path, in no particular order; hidden ones only where `sees_hidden`.

    may_hold: which folders to look into, by relative path. Links to files are files; links to folders are counted in
    `left_out`, and so are links to nothing or in a circle, and what is no file, which would be waited for when opened.
    Raises PhalanxError where a folder may not be read.
    """
    folders = [""]
    while folders:
        folder = folders.pop()
        for name, entry in _entries(root, folder):
            if entry.name.startswith(".") and not sees_hidden:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders += [name] if may_hold is None or may_hold(name) else []
                continue
            found = _followed(entry)
            if found is not None and stat.S_ISREG(found.st_mode):
                yield InputFile(name, found.st_size)
            elif found is not None:
                left_out[LINKED_FOLDERS if stat.S_ISDIR(found.st_mode) else NO_FILES] += 1
            elif entry.is_symlink():
                left_out[BROKEN_LINKS] += 1


def _followed(entry: os.DirEntry[str]) -> os.stat_result | None:
    """What an entry is, or leads to; None where a link leads nowhere or in a circle, or the file is gone by now."""
    try:
        return entry.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            return None
        if isinstance(error, PermissionError):
            raise _may_not_read(entry.path) from error
        raise OutsideError(f"{entry.path}: {error.strerror or error}") from error


def _entries(root: str, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """The entries of a folder, each with its path relative to the root."""
    try:
        with os.scandir(Path(root, folder)) as entries:
            for entry in entries:
                yield (f"{folder}/{entry.name}" if folder else entry.name), entry
    except PermissionError as error:
        raise _may_not_read(error.filename or str(Path(root, folder))) from error
    except OSError as error:
        raise OutsideError(f"{Path(root, folder)}: {error.strerror or error}") from error


def _may_not_read(path: str) -> PhalanxError:
    return PhalanxError(path, expected="a folder this user may read", remedy="change its permissions")
