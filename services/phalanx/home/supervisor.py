"""Keeps the processes of a home alive: starts them, starts again what dies, says what they are, ends them all.

A process that exits with code 2 was told something that its user must change: it is not started again, and the
supervisor ends with that. Anything else is started again, after a pause that doubles while it keeps dying. The state
file is written before anybody is told of a change. Killed, the supervisor takes its processes with it (`child`); who
starts the home next waits for their end (`left`).
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.agent.ending import read_end
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.gang import StopSignals
from phalanx.home.addresses import Addresses
from phalanx.home.layout import AGENT, Home
from phalanx.home.left import AGENT_END_S
from phalanx.home.state import HomeState, ProcessState, write_last_end, write_state
from phalanx.rpc.metrics import PROCESS_HEADER

FIRST_PAUSE_S, LONGEST_PAUSE_S, SETTLED_AFTER_S = 0.2, 10.0, 30.0
TICK_S = 0.1
SERVICE_GRACE_S = 15.0
USER_ERROR = 2
_PROBE_DEADLINE_S = 1.0


@dataclass(slots=True)
class _Child:
    """One process through all its starts."""

    name: str
    log: Path
    health: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    start_again_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    restarts: int = 0
    ready: bool = False
    last_exit: str = ""
    log_start: int = 0
    is_told: bool = False

    @property
    def state(self) -> ProcessState:
        return ProcessState(
            self.name, self.process.pid if self.process else 0, self.ready, self.restarts, self.last_exit
        )

    def start(self) -> None:
        """Start it; its output is appended to its log."""
        self.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.started_s, self.ready, self.is_told = time.monotonic(), False, False

    def tell(self) -> None:
        """SIGTERM, once: a process that ends already has its handlers no more when its interpreter winds up, and a
        second signal would kill it there.
        """
        if self.process is not None and not self.is_told:
            self.process.terminate()
            self.is_told = True

    def end(self, grace_s: float) -> bool:
        """SIGTERM, and SIGKILL after the grace; False when that was needed."""
        if self.process is None:
            return True
        is_willing = True
        self.tell()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            is_willing = False
            self.process.kill()
            self.process.wait()
        self.last_exit, self.process, self.ready = _told(self.process.returncode), None, False
        return is_willing


class Supervisor:
    """The processes of one home. commands: by name (see `commands_of`), each serves /healthz at `addresses.metrics`.
    agent_grace_s: how long ranks may take to commit when all ends; the agent itself sees to that. lost: what they did
    not commit, once all has ended.
    """

    def __init__(
        self, home: Home, addresses: Addresses, commands: Mapping[str, Sequence[str]], agent_grace_s: float
    ) -> None:
        self._home, self._addresses, self._agent_grace_s = home, addresses, agent_grace_s
        self._children = [
            _Child(name, home.log(name), addresses.metrics[name], command) for name, command in commands.items()
        ]
        self._told: HomeState | None = None
        self.lost: tuple[str, ...] = ()

    def run(self, stop: StopSignals, on_change: Callable[[HomeState], None]) -> None:
        """Until a stop is asked for. on_change: told of every new state. Raises PhalanxError when a process says that
        the user must change something, OutsideError when one cannot be started.
        """
        try:
            for child in self._children:
                child.start()
            while not stop.count:
                self._look()
                self._tell(on_change)
                self._wait(stop)
        finally:
            self._end(on_change)

    def _wait(self, stop: StopSignals) -> None:
        """A tick, or less when a process ends; a signal ends the wait too."""
        end_s = time.monotonic() + TICK_S
        while not stop.count and time.monotonic() < end_s:
            time.sleep(TICK_S / 5)
            if any(child.process is not None and child.process.poll() is not None for child in self._children):
                return

    def _look(self) -> None:
        now_s = time.monotonic()
        for child in self._children:
            if child.process is None:
                if now_s >= child.start_again_s:
                    child.start()
            elif (code := child.process.poll()) is not None:
                self._settle(child, code, now_s)
            elif not child.ready:
                child.ready = _is_healthy(child.health, child.process.pid)

    def _settle(self, child: _Child, code: int, now_s: float) -> None:
        child.last_exit, child.process, child.ready = _told(code), None, False
        if code == USER_ERROR:
            raise PhalanxError(
                child.name,
                expected=f"to start ({_last_words(child.log, child.log_start) or 'see its log'})",
                remedy=f"see {child.log}",
            )
        if now_s - child.started_s > SETTLED_AFTER_S:
            child.pause_s = FIRST_PAUSE_S
        child.start_again_s = now_s + child.pause_s
        child.pause_s = min(2 * child.pause_s, LONGEST_PAUSE_S)
        child.restarts += 1

    def _tell(self, on_change: Callable[[HomeState], None]) -> None:
        processes = tuple(child.state for child in self._children)
        state = HomeState(os.getpid(), self._addresses.page_url, processes, self._agent_grace_s)
        if state != self._told:
            write_state(self._home, state)
            self._told = state
            on_change(state)

    def _end(self, on_change: Callable[[HomeState], None]) -> None:
        """The agent first, while the services still take its ranks' last checkpoint."""
        for child in sorted(self._children, key=lambda child: child.name != AGENT):
            if child.name == AGENT:
                self.lost = self._end_agent(child)
            else:
                self._terminate()
                child.end(SERVICE_GRACE_S)
            self._tell(on_change)
        write_last_end(self._home, self.lost)

    def _terminate(self) -> None:
        """All at once: they end side by side."""
        for child in self._children:
            child.tell()

    def _end_agent(self, child: _Child) -> tuple[str, ...]:
        """What its ranks did not commit. The agent ends them after their grace; only one that hangs is killed here."""
        if child.process is None:
            return ()
        pid, grace_s = child.process.pid, self._agent_grace_s + AGENT_END_S
        if not child.end(grace_s):
            return (f"the agent (pid {pid}) did not end within {grace_s:g} s and was killed with its ranks",)
        return tuple(map(str, read_end(self._home.agent_state, pid) or ()))


def commands_of(home: Home, names: Sequence[str], agent_grace_s: float) -> dict[str, list[str]]:
    """How the processes of those names are started by this one, so that they end with it."""
    start = [sys.executable, "-P", "-m", "phalanx.home.child"]

    def command(name: str) -> list[str]:
        order = ["--grace", str(agent_grace_s)] if name == AGENT else ["--after", str(home.place(AGENT))]
        module = [str(os.getpid()), f"phalanx.{name}", "--config", str(home.config(name))]
        return [*start, "--place", str(home.place(name)), *order, *module]

    return {name: command(name) for name in names}


def _is_healthy(address: str, pid: int) -> bool:
    """Whether the process of that pid answers on /healthz, and no other one in its place."""
    connection = http.client.HTTPConnection(address, timeout=_PROBE_DEADLINE_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.status == http.HTTPStatus.OK and answer.headers[PROCESS_HEADER] == str(pid)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _told(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def _last_words(log: Path, start: int) -> str:
    """What the process said for its user, or said last, since its log was so long; without its name in front."""
    try:
        lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
    except OSError as error:
        raise OutsideError(f"the log {log} cannot be read: {error.strerror}") from error
    for_user = [line for line in lines if line.startswith("phalanx: ")] or lines
    return for_user[-1].removeprefix("phalanx: ") if for_user else ""
