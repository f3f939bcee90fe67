"""The demo's own services: `phalanx up` in its folder, as processes that can be killed, and ended with the demo."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from phalanx.client import Client
from phalanx.core.errors import OutsideError
from phalanx.home.detached import end, start_detached, wait_ready
from phalanx.home.layout import Home
from phalanx.home.state import HomeState, read_state

SLOTS = 8
UP_DEADLINE_S, DOWN_DEADLINE_S = 60.0, 60.0
AGENT_GRACE_S = 20


class Cluster:
    """Running services. client: an operator's."""

    def __init__(self, home: Home, client: Client) -> None:
        self.home, self.client = home, client

    @property
    def state(self) -> HomeState:
        """What the supervisor says now."""
        state = read_state(self.home)
        if state is None:
            raise OutsideError(f"the demo's services are gone; see {self.home.log('up')}")
        return state

    def kill(self, process: str) -> int:
        """SIGKILL to a service or the agent; its pid."""
        pid = self.state.process(process).pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_rank(self) -> int:
        """SIGKILL to a rank, the last that was forked; its pid."""
        agent = psutil.Process(self.state.process("agent").pid)
        servers = [child.pid for child in agent.children() if "phalanx.gang.server" in child.cmdline()]
        ranks = [child.pid for child in agent.children(recursive=True) if child.ppid() in servers]
        if not ranks:
            raise OutsideError("no rank lives that could be killed")
        os.kill(max(ranks), signal.SIGKILL)
        return max(ranks)

    @property
    def restarts(self) -> dict[str, int]:
        """How often each process was started again."""
        return {each.name: each.restarts for each in self.state.processes}


@contextmanager
def running_cluster(folder: Path, *, keep: bool) -> Iterator[Cluster]:
    """Services with an agent in `folder`, ended on leaving unless `keep`."""
    home = Home(folder)
    arguments = ["--home", str(folder), "--port-base", "0", "--slots", str(SLOTS), "--agent-grace", str(AGENT_GRACE_S)]
    process = start_detached(home, arguments)
    try:
        wait_ready(home, process, UP_DEADLINE_S, lambda _: None)
        with Client(home.client) as client:
            yield Cluster(home, client)
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            end(home, DOWN_DEADLINE_S)
            process.wait(DOWN_DEADLINE_S)
