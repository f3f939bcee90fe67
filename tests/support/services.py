"""The services of one machine for tests: `phalanx up` as a real process with a home of its own, and its processes to be
killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from phalanx import Client
from phalanx.home.layout import Home
from phalanx.home.state import HomeState, read_state
from support.jobs import PHALANX, Command, wait_until

UP_DEADLINE_S = 60.0


class Services:
    """A running `phalanx up`."""

    def __init__(self, home: Home, command: Command) -> None:
        self.home, self.command = home, command

    @property
    def state(self) -> HomeState:
        """What the supervisor says now."""
        state = read_state(self.home)
        assert state is not None, f"no supervisor:\n{self.command.err}"
        return state

    def wait_ready(self, deadline_s: float = UP_DEADLINE_S) -> HomeState:
        """Returns once every process is up."""
        end_s = time.monotonic() + deadline_s
        while True:
            assert self.command.process.poll() is None, f"`phalanx up` ended:\n{self.command.err}\n{self.logs()}"
            state = read_state(self.home)
            if state is not None and state.ready:
                return state
            assert time.monotonic() < end_s, f"not up:\n{self.command.err}\n{self.logs()}"
            time.sleep(0.05)

    def kill(self, name: str, signum: int = signal.SIGKILL) -> int:
        """A signal to one process; its pid."""
        pid = self.state.process(name).pid
        os.kill(pid, signum)
        return pid

    def restart(self, name: str) -> None:
        """SIGKILL, and back once the supervisor has it up again."""
        restarts = self.state.process(name).restarts
        self.kill(name)
        wait_until(lambda: self.state.process(name).restarts > restarts, UP_DEADLINE_S, f"{name} is not started again")
        self.wait_ready()

    def ranks(self) -> tuple[int, ...]:
        """Pids of the living ranks, in the order in which they were forked."""
        found = []
        for child in psutil.Process(self.state.process("agent").pid).children(recursive=True):
            try:
                parent = child.parent()
                if parent is not None and "phalanx.gang.server" in parent.cmdline():
                    found.append(child.pid)
            except psutil.NoSuchProcess:
                continue
        return tuple(sorted(found))

    def client(self) -> Client:
        """An operator's client; close it."""
        return Client(self.home.client)

    def logs(self) -> str:
        """The ends of all logs, for messages of failed tests."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.home.log("x").parent.glob("*.log"))
        )


@contextmanager
def services(
    folder: Path, *options: str, slots: int = 8, environ: Mapping[str, str] | None = None
) -> Iterator[Services]:
    """`phalanx up` in `folder`, ended with everything that it started."""
    home = Home(folder.absolute())
    arguments = ["up", "--home", folder, "--port-base", "0", "--slots", str(slots), "--agent-grace", "5", *options]
    with Command([PHALANX, *arguments], environ) as command:
        running = Services(home, command)
        running.wait_ready()
        yield running
        command.signal(signal.SIGTERM)
        command.finish()
        command.wait_until_nothing_lives()
