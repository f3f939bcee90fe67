"""The services of one machine for tests: `phalanx up` as a real process with a home of its own, and its processes to be
killed.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil

from phalanx import Client
from phalanx.home.layout import Home
from phalanx.home.state import HomeState, read_state
from phalanx.rpc.config import read_service, write_config
from phalanx.rpc.tables import Scalar
from phalanx.train.values import EventView
from support.jobs import PHALANX, Command, Finished, run_cli, wait_until
from support.tcp_proxy import Network

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

    def configure(self, name: str, **options: Scalar) -> None:
        """Gives one process other settings of its own, with which it starts again; they last until the next `up`."""
        path = self.home.config(name)
        config = read_service(path)
        write_config(path, replace(config, options={**config.options, **options}))
        self.restart(name)

    def route_agent(self, network: Network, names: Sequence[str]) -> None:
        """The agent, started again, reaches those services through `network`."""
        path = self.home.config("agent")
        config = read_service(path)
        through = {name: network.before(config.services[name]) for name in names}
        write_config(path, replace(config, services={**config.services, **through}))
        self.restart("agent")

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

    def cli(self, *arguments: str | Path, code: int = 0) -> Finished:
        """`phalanx ARGUMENTS...` as an operator of these services, which must end with `code`."""
        finished = run_cli(arguments, environ={"PHALANX_CONTEXT": str(self.home.client)})
        assert finished.code == code, f"{arguments}: {finished}"
        return finished

    def told(self, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
        """The object that `phalanx ARGUMENTS... --json` prints."""
        found = json.loads(self.cli(*arguments, "--json", code=code).out)
        assert isinstance(found, dict)
        return found

    def page(self, path: str, **query: str) -> dict[str, Any]:
        """What the monitor's page is told at `/api/<path>`."""
        address = read_service(self.home.config("monitor")).options["page"]
        with urllib.request.urlopen(f"http://{address}/api/{path}?{urlencode(query)}", timeout=30) as answer:
            found = json.load(answer)
        assert isinstance(found, dict)
        return found

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


def events_until(
    client: Client, job: str, is_last: Callable[[EventView], bool], deadline_s: float = 60.0
) -> list[EventView]:
    """All events of a job from the first on, up to one that `is_last`."""
    end_s = time.monotonic() + deadline_s
    seen: list[EventView] = []
    for event in client.train.watch(job, give_up_s=deadline_s):
        seen.append(event)
        if is_last(event):
            return seen
        assert time.monotonic() < end_s, f"not there after {deadline_s:g} s: {seen[-5:]}"
    raise AssertionError(f"the stream ended: {seen[-5:]}")


def wait_for_step(client: Client, job: str, step: int, deadline_s: float = 60.0) -> None:
    """Returns once a rank of the job's newest attempt has told of that step or a later one."""

    def is_there() -> bool:
        view = client.job(job)
        assert not view.is_over or view.step >= step, view
        return view.step >= step and view.loss is not None

    wait_until(is_there, deadline_s, f"{job} is not at step {step}")


def resized(path: Path, *edits: tuple[str, str], name: str = "") -> Path:
    """A copy of a job file beside it, with edits and another name."""
    text = path.read_text()
    for before, after in (*edits, *([('name = "tiny"', f'name = "{name}"')] if name else [])):
        assert before in text, before
        text = text.replace(before, after)
    copy = path.with_name(f"{name or 'job-copy'}.toml")
    copy.write_text(text)
    return copy
