"""The demo's working folder: made anew by each run, and never anybody else's."""

from __future__ import annotations

import shutil
from pathlib import Path

from phalanx.core.errors import PhalanxError

MARKER = ".phalanx-demo"


def fresh_folder(folder: Path) -> Path:
    """An empty `folder` with the demo's marker; what an earlier demo left there is removed. Raises PhalanxError for a
    folder of others.
    """
    folder = folder.absolute()
    if folder.exists():
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / MARKER).exists()):
            raise PhalanxError(
                "--dir",
                value=str(folder),
                expected="a new folder, or one that a demo made",
                remedy="choose another folder",
            )
        # The marker goes last: a removal that is cut short leaves a folder that the next demo still knows as its own.
        for entry in folder.iterdir():
            if entry.name != MARKER:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()
    except OSError as error:
        raise PhalanxError(
            "--dir",
            value=str(folder),
            expected="a folder that can be written",
            remedy=f"choose another one ({error.strerror})",
        ) from error
    return folder
