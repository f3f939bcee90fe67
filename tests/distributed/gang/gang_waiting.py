"""Waiting on conditions, and a parent program that can be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> float:
    """Poll until `condition` holds; the seconds it took."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < deadline_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - start_s


class Parent:
    """A running gang_parent.py, or another program that takes the same arguments."""

    def __init__(
        self,
        log_dir: Path,
        world_size: int,
        entry: str,
        grace_s: float,
        preload: tuple[str, ...],
        program: str = "gang_parent.py",
    ) -> None:
        command = [sys.executable, str(HERE / program), str(log_dir), str(world_size), entry, str(grace_s)]
        self.process = subprocess.Popen([*command, *preload], stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.pids: list[int] = []

    def read_until(self, kind: str, event: str | None = None, times: int = 1) -> dict:
        """The `times`-th line of this kind; keeps every pid that it reads of."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            self.pids += [told["pid"]] if told["kind"] == "server" else told.get("pids", [])
            if told["kind"] == kind and event in (None, told.get("event")):
                times -= 1
                if times == 0:
                    return told
        raise AssertionError(f"ended without {kind} {event}")

    def wait_all_gone(self, deadline_s: float) -> float:
        return wait_until(lambda: not any(map(is_alive, self.pids)), deadline_s, f"processes {self.pids} gone")
