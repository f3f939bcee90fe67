"""Starts a supervisor that outlives the command, waits for it, and ends it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.home.layout import AGENT, Home
from phalanx.home.left import end_left
from phalanx.home.places import living
from phalanx.home.state import HomeState, is_held, read_last_end, read_state

_PAUSE_S = 0.1
_START_DEADLINE_S = 10.0
_QUIET_S = 2.0
_LONGEST_END_S = 120.0  # of all processes, beyond the grace of ranks


def start_detached(home: Home, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """`phalanx up ARGUMENTS` in a session of its own; what it prints goes to HOME/logs/up.log."""
    log_path = home.log("up")
    log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_ready(
    home: Home,
    process: subprocess.Popen[bytes] | None,
    deadline_s: float,
    on_state: Callable[[HomeState], None],
    remedy: str = "",
) -> HomeState:
    """The state once every process is up. process: the supervisor, where this command started it. remedy: how a user
    may lengthen the deadline, said where it passes.

    Raises PhalanxError with the supervisor's own words when it ends with 2, OutsideError when it ends otherwise or the
    deadline passes.
    """
    end_s, said = time.monotonic() + deadline_s, ""
    while time.monotonic() < end_s:
        state = read_state(home)
        if state is not None:
            said = _not_up(home, state)
            on_state(state)
            if state.ready:
                return state
        if process is not None and (code := process.poll()) is not None:
            raise _ended(home, code)
        time.sleep(_PAUSE_S)
    more = f"; {remedy}" if remedy else ""
    raise OutsideError(
        f"the services of {home.folder} are not up within {deadline_s:g} s{said}; see {home.log('up')}{more}"
    )


def _not_up(home: Home, state: HomeState) -> str:
    """Which processes are not up, and how those ended last that were started again."""
    parts = [
        f"{each.name} ended {each.restarts} times, last with {each.last_exit}: see {home.log(each.name)}"
        if each.restarts
        else f"{each.name} is still starting"
        for each in state.processes
        if not each.ready
    ]
    return f" ({'; '.join(parts)})" if parts else ""


@dataclass(frozen=True, slots=True)
class Ended:
    """was_up: whether anything lived. lost: what ranks did not commit before they were killed."""

    was_up: bool
    lost: tuple[str, ...] = ()


def end(home: Home, deadline_s: float | None = None, tell: Callable[[str], None] = lambda _: None) -> Ended:
    """Ends the supervisor of the folder, and with it its processes; or what one that was killed left behind. tell:
    takes what is waited for, once that lasts.

    deadline_s: None: as long as the processes are given. Raises OutsideError past the deadline.
    """
    state = _supervisor(home)
    if state is None:
        return Ended(bool(living(home)), tuple(end_left(home, tell)))
    pid = state.supervisor
    longest_s = state.agent_grace_s + _LONGEST_END_S if deadline_s is None else deadline_s
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    _await_end(home, pid, longest_s, tell)
    left = end_left(home, tell)  # the supervisor was killed meanwhile
    lost = read_last_end(home, pid)
    if lost is None and not left:
        return Ended(True, (f"the supervisor (pid {pid}) ended without a word: ranks may not have committed",))
    return Ended(True, (*(lost or ()), *left))


def _await_end(home: Home, pid: int, deadline_s: float, tell: Callable[[str], None]) -> None:
    start_s, told, words = time.monotonic(), "", ""
    while is_held(home):
        passed_s = time.monotonic() - start_s
        state = read_state(home)
        if state is not None:
            words = _waited_for(state)
        if passed_s > _QUIET_S and words != told:
            tell(f"waiting for {words}")
            told = words
        if passed_s > deadline_s:
            raise OutsideError(
                f"the supervisor (pid {pid}) of {home.folder} did not end within {deadline_s:g} s: it still waits for"
                f" {words}; `phalanx down` again waits on"
            )
        time.sleep(_PAUSE_S)


def _waited_for(state: HomeState) -> str:
    alive = [each for each in state.processes if each.pid]
    for each in alive:
        if each.name == AGENT:
            return f"the agent (pid {each.pid}): its ranks commit first, for {state.agent_grace_s:g} s at most"
    return ", ".join(f"{each.name} (pid {each.pid})" for each in alive) or "the supervisor itself"


def _supervisor(home: Home) -> HomeState | None:
    """What it says; it holds the lock a moment before it says who it is."""
    end_s = time.monotonic() + _START_DEADLINE_S
    while is_held(home):
        state = read_state(home)
        if state is not None:
            return state
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
