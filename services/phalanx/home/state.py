"""What the supervisor says of its processes, in HOME/state.json; and whether a supervisor lives at all."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.files import write_atomically
from phalanx.home.layout import Home

_PROBE_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One supervised process. pid: 0 while it is being restarted. last_exit: how it ended last, "" if it never did."""

    name: str
    pid: int
    ready: bool
    restarts: int
    last_exit: str = ""


@dataclass(frozen=True, slots=True)
class HomeState:
    """supervisor: its pid. agent_grace_s: what ranks get to commit in, when they are told to end."""

    supervisor: int
    page_url: str
    processes: tuple[ProcessState, ...]
    agent_grace_s: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether every process is up."""
        return bool(self.processes) and all(each.ready for each in self.processes)

    def process(self, name: str) -> ProcessState:
        """The process of that name; raises KeyError."""
        return next(each for each in self.processes if each.name == name)


def write_state(home: Home, state: HomeState) -> None:
    """Replaces the file as a whole."""
    write_atomically(home.state, json.dumps(asdict(state), indent=2).encode() + b"\n")


def read_state(home: Home) -> HomeState | None:
    """What the supervisor of the folder says; None where no supervisor lives."""
    if not is_held(home):
        return None
    try:
        fields: dict[str, Any] = json.loads(home.state.read_bytes())
        processes = tuple(ProcessState(**each) for each in fields.pop("processes"))
        return HomeState(**fields, processes=processes)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise PhalanxError(
            str(home.state),
            expected="what the supervisor wrote",
            remedy="remove it; end the process that holds up.lock beside it (`lsof` names it), and start again",
        ) from None


def is_held(home: Home) -> bool:
    """Whether a supervisor holds the folder's lock. A lock of the kernel's: it ends with its holder, however that
    ends.
    """
    try:
        descriptor = os.open(home.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def held(home: Home) -> Iterator[None]:
    """Holds the folder. Raises PhalanxError when another supervisor does."""
    home.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, home)
        # Left by a supervisor that was killed: nobody may take it for the state of this one.
        home.state.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, home: Home) -> None:
    """Takes the lock; whoever only looks whether it is held (`is_held`) lets go at once."""
    end_s = time.monotonic() + _PROBE_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end_s:
                time.sleep(0.05)
                continue
            raise is_up(home) from None
        return


def begin(home: Home, agent_grace_s: float) -> None:
    """Says who the supervisor is, before it has processes."""
    write_state(home, HomeState(os.getpid(), "", (), agent_grace_s))
    write_last_end(home, ())


def write_last_end(home: Home, lost: Sequence[str]) -> None:
    """How this supervisor ended its processes. lost: what ranks did not commit."""
    write_atomically(home.last_end, json.dumps({"supervisor": os.getpid(), "lost": list(lost)}).encode() + b"\n")


def read_last_end(home: Home, supervisor: int) -> tuple[str, ...] | None:
    """What was lost when the supervisor of that pid ended its processes; None where it did not say."""
    try:
        said = json.loads(home.last_end.read_bytes())
        return tuple(map(str, said["lost"])) if said["supervisor"] == supervisor else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_up(home: Home) -> PhalanxError:
    """What to tell whoever wants to start services where some are up."""
    return PhalanxError(
        "--home",
        value=str(home.folder),
        expected="a folder whose services are not up",
        remedy="see `phalanx status`; `phalanx down` ends them; or choose another --home",
    )
