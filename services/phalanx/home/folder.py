"""The home folder as a user names it, and what is told when it cannot be used."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.home.layout import Home

# What is not the user's choice of a folder: a full or broken disk, a machine out of processes.
_OUTSIDE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.ESTALE,
    errno.ENOLCK,
}


def home_of(text: str) -> Home:
    """The home that `--home` names. Raises PhalanxError for what can be no folder's name."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refused(text, "a path in UTF-8") from None
    if not text or "\0" in text:
        raise _refused(text, "the name of a folder")
    try:
        return Home(Path(text).absolute())
    except OSError as error:
        raise _refused(text, f"a folder ({error.strerror})") from error


@contextmanager
def using(home: Home) -> Iterator[None]:
    """What fails inside for the folder's sake is told in one line: PhalanxError where another folder, or other rights,
    would do; OutsideError where the disk is full or broken.
    """
    try:
        yield
    except OSError as error:
        path = error.filename2 or error.filename
        where = f"{error.strerror or error}" + (f": {path}" if path and str(path) != str(home.folder) else "")
        if error.errno in _OUTSIDE:
            raise OutsideError(f"the home folder {home.folder} cannot be used: {where}") from error
        raise _refused(str(home.folder), f"a folder of one's own that can be used ({where})") from error


def _refused(text: str, expected: str) -> PhalanxError:
    return PhalanxError("--home", value=text, expected=expected, remedy="correct its path or rights, or name another")
