"""Temporary files of writers that were killed: whose they are, and when they may go.

A temporary file's name says who writes it: the place (one boot of one kernel, one namespace of process numbers, one
host name, as a digest), the process number and the moment in which that process began. A file is removed only where
its writer is provably dead: it is of this very place, and here no process has that number, or one that began at
another moment. Files of other hosts, containers and boots, and files of any other name, are never touched. Ages and
clocks of file systems decide nothing. Should a digest of two places ever be the same, the writer whose file vanished
gets an error at its commit; no object is harmed.
"""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.digest import xxh3
from phalanx.objects.base import TEMPORARY_SUFFIX

_NAME = re.compile(rf"\.([0-9a-f]{{32}})-([0-9]+)-([0-9]+)-[0-9a-f]{{32}}{re.escape(TEMPORARY_SUFFIX)}")
_NAMESPACES = Path("/proc/self/ns")  # older kernels have none of time
_BEGAN, _COMMAND_END = 19, ") "  # proc_pid_stat(5): starttime is field 22, the 20th after the command's name


@dataclass(frozen=True, slots=True)
class Here:
    """Where this process runs, for judging others of the same place. place: 32 hexadecimal digits."""

    place: str

    def is_dead(self, name: str) -> bool:
        """Whether `name` is a temporary file of this place whose writer is provably dead."""
        match = _NAME.fullmatch(name)
        if match is None or match[1] != self.place:
            return False
        pid = int(match[2])
        try:
            os.kill(pid, 0)
            return _began(pid) != int(match[3])
        except (ProcessLookupError, OverflowError):
            return True
        except (OSError, ValueError, IndexError):  # another user's, or gone this instant: not proven
            return False


def here() -> Here | None:
    """The place of this process; None where the system does not tell it, and then nothing is ever swept.

    Not cached: a child after a fork may live in another namespace.
    """
    try:
        if str(Path("/proc/self").readlink()) != str(os.getpid()):  # a /proc of another namespace shows other processes
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [str(link.readlink()) for link in map(_NAMESPACES.joinpath, ("pid", "time")) if link.is_symlink()]
    except OSError:
        return None
    digest = xxh3("\n".join([boot, *spaces, os.uname().nodename]).encode())
    return Here(digest.rpartition(":")[2])


def temporary_name() -> str:
    """A fresh name for a file that this process writes."""
    own, unique = here(), uuid.uuid4().hex
    try:
        mark = f"{own.place}-{os.getpid()}-{_began(os.getpid())}-" if own else ""
    except (OSError, ValueError, IndexError):
        mark = ""
    return f".{mark}{unique}{TEMPORARY_SUFFIX}"


def _began(pid: int) -> int:
    """The moment in which a process began, in ticks since this boot."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(_COMMAND_END)[2].split()[_BEGAN])


def remove_if_dead(path: Path) -> None:
    """Removes a temporary file if its writer is provably dead and this user may; else it stays."""
    own = here()
    if own is not None and own.is_dead(path.name):
        with suppress(OSError):
            path.unlink()


def sweep(folder: Path, most_entries: int) -> None:
    """Removes what dead writers left directly in `folder`, looking at `most_entries` names at most."""
    with suppress(OSError), os.scandir(folder) as entries:
        for _, entry in zip(range(most_entries), entries, strict=False):
            if entry.name.endswith(TEMPORARY_SUFFIX):
                remove_if_dead(Path(entry.path))
