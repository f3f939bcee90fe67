"""More agents beside the one of `phalanx up`: nodes of their own on this machine, to be killed with their ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from phalanx.rpc.config import read_service, write_config
from phalanx.rpc.tables import Scalar
from support.jobs import wait_until
from support.services import Services

DEADLINE_S = 60.0
DOOMED = Path(__file__).with_name("doomed_agent.py")


class ExtraAgent:
    """An agent process; its home's configuration with a state folder and a name of its own."""

    def __init__(self, running: Services, name: str, **options: Scalar) -> None:
        self._running, self.name = running, name
        self.dies_at: tuple[str, ...] = ()  # of `doomed_agent`, for the next start
        config = read_service(running.home.config("agent"))
        state = running.home.folder / f"node-{name}"
        self._path = running.home.folder / f"agent-{name}.toml"
        self.log = running.home.log(f"agent-{name}")
        own = {"state_dir": str(state), "node": name, "slots": 1, **options}
        write_config(self._path, replace(config, metrics="", options={**config.options, **own}))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """A new process; returns once train knows it."""
        with self.log.open("ab") as log:
            program = [str(DOOMED)] if self.dies_at else ["-m", "phalanx.agent"]
            command = [sys.executable, *program, "--config", str(self._path)]
            environ = {**os.environ, "DIES_AT": " ".join(self.dies_at)}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        with self._running.client() as client:
            wait_until(
                lambda: any(each.node.node_id == self.name and each.node.is_connected for each in client.train.nodes()),
                DEADLINE_S,
                f"agent {self.name} does not come",
            )

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    def wait_dead(self, deadline_s: float = DEADLINE_S) -> None:
        """Returns once it has met its end."""
        assert self._process is not None
        assert self._process.wait(deadline_s) == -signal.SIGKILL

    def kill(self) -> None:
        """SIGKILL; its ranks and its memory go with it."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(DEADLINE_S)

    def close(self) -> None:
        """Ends what is left."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def rank_log(self, attempt: int, rank: int) -> Path:
        """What a rank of the only job wrote here."""
        found = list(
            (self._running.home.folder / f"node-{self.name}").glob(f"ranks/*/*/attempt-{attempt}/rank{rank}.log")
        )
        return found[0] if found else Path(os.devnull)


@contextmanager
def extra_agent(
    running: Services, name: str, *, dies_at: tuple[str, ...] = (), **options: Scalar
) -> Iterator[ExtraAgent]:
    """An agent that lives until the end, or until it is killed. dies_at: points of `doomed_agent`."""
    agent = ExtraAgent(running, name, **options)
    agent.dies_at = dies_at
    try:
        agent.start()
        yield agent
    finally:
        agent.close()
