"""Which processes of a home live, whoever started them: each holds the lock of its own file, HOME/processes/<name>.

A lock of the kernel's, which ends with its holder; the file says who that is. So what a killed supervisor left behind
is known for sure: no pid is taken for another's.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import OutsideError
from phalanx.home.layout import AGENT, SERVICES, Home

_TAKE_DEADLINE_S, _READ_DEADLINE_S, _PAUSE_S = 10.0, 2.0, 0.02


@dataclass(frozen=True, slots=True)
class Living:
    """A process that lives. grace_s: what it was given for its end."""

    name: str
    pid: int
    grace_s: float

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


def take(path: Path, grace_s: float) -> None:
    """Holds the place until this process ends. Raises OutsideError where another process keeps it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end_s = time.monotonic() + _TAKE_DEADLINE_S
    while not _is_taken(descriptor, fcntl.LOCK_EX):
        if time.monotonic() > end_s:
            raise OutsideError(f"the place {path} is held by another process of this home, which still lives")
        time.sleep(_PAUSE_S)
    said = json.dumps({"pid": os.getpid(), "started": _start_of(os.getpid()), "grace_s": grace_s}).encode()
    os.pwrite(descriptor, said, 0)
    os.ftruncate(descriptor, len(said))


def living(home: Home) -> tuple[Living, ...]:
    """The processes of the home that live, the agent first."""
    found = (at(home, name) for name in (AGENT, *SERVICES))
    return tuple(each for each in found if each is not None)


def at(home: Home, name: str) -> Living | None:
    """The process of that name; None where none lives."""
    return holder(home.place(name))


def holder(path: Path) -> Living | None:
    """The process that holds the place; None where none does."""
    end_s = time.monotonic() + _READ_DEADLINE_S
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if _is_taken(descriptor, fcntl.LOCK_SH):
                return None
            found = _told(path.name, os.pread(descriptor, 4096, 0))
        finally:
            os.close(descriptor)
        if found is not None:
            return found
        if time.monotonic() > end_s:
            raise OutsideError(f"the process that holds {path} does not say who it is")
        time.sleep(_PAUSE_S)


def _told(name: str, data: bytes) -> Living | None:
    """What the file says; None where that is of an earlier holder, or half written."""
    try:
        said = json.loads(data)
        pid, started, grace_s = int(said["pid"]), str(said["started"]), float(said["grace_s"])
    except (ValueError, KeyError, TypeError):
        return None
    return Living(name, pid, grace_s) if _start_of(pid) == started else None


def _start_of(pid: int) -> str:
    """When the process began, in the kernel's ticks; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_taken(descriptor: int, kind: int) -> bool:
    """Whether the lock could be had."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
