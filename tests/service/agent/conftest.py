"""Services for an agent, and agents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_kit import ENTRY, HERE, AgentProcess, World, is_alive, wait_until

from phalanx.agent.agent import Agent
from phalanx.rpc.testing import make_cluster


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Train, data, checkpoint and a receiver of figures, up and listening."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    made = World(make_cluster(tmp_path / "cluster"), tmp_path)
    for name in ("train", "data", "checkpoint", "monitor"):
        made.start(name)
    yield made
    for name in list(made.servers):
        made.stop(name)


@pytest.fixture
def agent(world: World) -> Iterator[Agent]:
    """An agent in this process, connected."""
    with Agent(world.agent_config(stop_grace_s=0.5), entry=ENTRY, preload=()) as made:
        wait_until(lambda: world.train.hellos, 10.0, "the agent's hello")
        yield made


@pytest.fixture
def start_agent(world: World) -> Iterator[Callable[..., AgentProcess]]:
    """Agents in processes of their own."""
    started: list[AgentProcess] = []

    def start(**options) -> AgentProcess:
        number = len(world.train.hellos)
        started.append(AgentProcess(world, **options))
        wait_until(lambda: len(world.train.hellos) > number, 15.0, "the agent's hello")
        return started[-1]

    yield start
    for each in started:
        children = each.descendants()
        each.process.kill()
        each.process.wait()
        for pid in filter(is_alive, children):
            os.kill(pid, 9)
