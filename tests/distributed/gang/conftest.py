"""A fork server without torch, and parent programs that are ended after each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gang_waiting import HERE, Parent, is_alive

from phalanx.gang import ForkServer


@pytest.fixture
def start_parent(tmp_path: Path) -> Iterator[Callable[..., Parent]]:
    parents: list[Parent] = []

    def start(
        world_size: int, entry: str, *preload: str, grace_s: float = 30.0, program: str = "gang_parent.py"
    ) -> Parent:
        parents.append(Parent(tmp_path, world_size, f"gang_entries:{entry}", grace_s, preload, program))
        return parents[-1]

    yield start
    for parent in parents:
        parent.process.kill()
        parent.process.communicate()
        for pid in filter(is_alive, parent.pids):
            os.kill(pid, 9)


@pytest.fixture(scope="module")
def plain_server() -> Iterator[ForkServer]:
    """A fork server without torch: starts in a moment."""
    with ForkServer((), {"PYTHONPATH": str(HERE)}) as server:
        yield server
