"""The bound of what the logs of ranks take on this node: the attempts that ended first go first, never one that lives
here.

A file `removed` comes into an attempt's folder before anything leaves it, so that a reader is told why a log is not
there; killed in between, what is left counts and goes the next time.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import OutsideError

REMOVED = "removed"
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Folder:
    """An attempt's logs. newest_s: when one of them was last written (Unix time)."""

    path: Path
    num_bytes: int
    newest_s: float


def bound_logs(root: Path, max_bytes: int, living: Collection[Path]) -> tuple[Path, ...]:
    """Removes logs of ended attempts until all take at most `max_bytes`; the folders that it emptied, oldest first.

    root: holds `<project>/<uid>/attempt-<n>/`. living: the folders that stay, whatever they take; they count. What
    can't be removed is logged and stays.
    """
    found = [_measured(path) for path in root.glob("*/*/attempt-*")]
    excess = sum(folder.num_bytes for folder in found) - max_bytes
    gone: list[Path] = []
    for folder in sorted(found, key=lambda folder: folder.newest_s):
        if excess <= 0:
            break
        if folder.num_bytes and folder.path not in living and _emptied(folder.path):
            excess -= folder.num_bytes
            gone.append(folder.path)
    return tuple(gone)


def refuse_removed(folder: Path, attempt: int) -> None:
    """Raises OutsideError where the logs of the attempt had to go."""
    if (folder / REMOVED).exists():
        raise OutsideError(
            f"the logs of attempt {attempt} had to go: those of all jobs took more than the agent's"
            " options.max_log_bytes; raise it for those to come (the job's events and metrics are still there)"
        )


def _measured(path: Path) -> _Folder:
    num_bytes, newest_s = 0, 0.0
    for file in path.rglob("*"):
        try:
            found = file.lstat()
        except FileNotFoundError:  # another prune of this node
            continue
        if file.name != REMOVED and not file.is_dir():
            num_bytes, newest_s = num_bytes + found.st_size, max(newest_s, found.st_mtime)
    return _Folder(path, num_bytes, newest_s)


def _emptied(path: Path) -> bool:
    try:
        (path / REMOVED).touch()
        for each in path.iterdir():
            if each.name != REMOVED:
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink(missing_ok=True)
    except OSError as error:
        LOG.error("logs of ranks take more than they may, and %s can't be removed: %s", path, error)
        return False
    LOG.info("the logs in %s had to go: logs of ranks take more than options.max_log_bytes", path)
    return True
