"""Starts a supervisor that outlives the command, waits for it, and ends it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.home.layout import Home
from phalanx.home.state import HomeState, is_held, read_state

_PAUSE_S = 0.1
_START_DEADLINE_S = 10.0


def start_detached(home: Home, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """`phalanx up ARGUMENTS` in a session of its own; what it prints goes to HOME/logs/up.log."""
    log_path = home.log("up")
    log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "phalanx.cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_ready(
    home: Home, process: subprocess.Popen[bytes] | None, deadline_s: float, on_state: Callable[[HomeState], None]
) -> HomeState:
    """The state once every process is up. process: the supervisor, where this command started it.

    Raises PhalanxError with the supervisor's own words when it ends with 2, OutsideError when it ends otherwise or the
    deadline passes.
    """
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        state = read_state(home)
        if state is not None:
            on_state(state)
            if state.ready:
                return state
        if process is not None and (code := process.poll()) is not None:
            raise _ended(home, code)
        time.sleep(_PAUSE_S)
    raise OutsideError(f"the services of {home.folder} are not up within {deadline_s:g} s; see {home.log('up')}")


def end(home: Home, deadline_s: float) -> bool:
    """Ends the supervisor of the folder, and with it its processes; False where none lives. Raises OutsideError past
    the deadline.
    """
    end_s = time.monotonic() + deadline_s
    pid = _supervisor(home)
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    while is_held(home):
        if time.monotonic() > end_s:
            raise OutsideError(f"the supervisor (pid {pid}) of {home.folder} did not end within {deadline_s:g} s")
        time.sleep(_PAUSE_S)
    return True


def _supervisor(home: Home) -> int | None:
    """Its pid; it holds the lock a moment before it says who it is."""
    end_s = time.monotonic() + _START_DEADLINE_S
    while is_held(home):
        state = read_state(home)
        if state is not None:
            return state.supervisor
        if time.monotonic() > end_s:
            raise OutsideError(f"the supervisor of {home.folder} holds its lock and does not say who it is")
        time.sleep(_PAUSE_S)
    return None


def _ended(home: Home, code: int) -> Exception:
    lines = home.log("up").read_text(errors="replace").strip().splitlines()
    said = [line.removeprefix("phalanx: ") for line in lines if line.startswith("phalanx: ")]
    if code == 2 and said:
        return PhalanxError("phalanx up", expected=f"services that start ({said[-1]})", remedy="correct that")
    return OutsideError(f"the supervisor ended with {code}; see {home.log('up')}")
