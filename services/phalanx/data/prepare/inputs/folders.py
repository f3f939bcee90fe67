"""The files of a folder tree on a disk."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare.inputs.pieces import InputFile

LINKED_FOLDERS, BROKEN_LINKS = "links to folders", "broken links"


def walk(
    root: str, left_out: Counter[str], may_hold: Callable[[str], bool] | None = None, *, sees_hidden: bool = False
) -> Iterator[InputFile]:
    """Every file below `root`, by relative path, in no particular order; hidden ones only where `sees_hidden`.

    may_hold: which folders to look into, by relative path. Links to files are files; links to folders are counted in
    `left_out`, and so are links to nothing. Raises PhalanxError where a folder may not be read.
    """
    folders = [""]
    while folders:
        folder = folders.pop()
        for name, entry in _entries(root, folder):
            if entry.name.startswith(".") and not sees_hidden:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders += [name] if may_hold is None or may_hold(name) else []
            elif entry.is_file():
                yield InputFile(name, entry.stat().st_size)
            elif entry.is_symlink():
                left_out[LINKED_FOLDERS if entry.is_dir() else BROKEN_LINKS] += 1


def _entries(root: str, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """The entries of a folder, each with its path relative to the root."""
    try:
        with os.scandir(Path(root, folder)) as entries:
            for entry in entries:
                yield (f"{folder}/{entry.name}" if folder else entry.name), entry
    except PermissionError as error:
        raise PhalanxError(
            error.filename or str(Path(root, folder)),
            expected="a folder this user may read",
            remedy="change its permissions",
        ) from error
    except OSError as error:
        raise OutsideError(f"{Path(root, folder)}: {error.strerror or error}") from error
