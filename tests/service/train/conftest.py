"""A cluster with a running train process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from train_kit import World, make_world

from phalanx.rpc.testing import make_cluster
from phalanx.train.client import TrainClient


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Train in this process, listening."""
    made = make_world(make_cluster(tmp_path / "cluster"), tmp_path)
    made.start_here()
    yield made
    made.close()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[World]:
    """Train in a process of its own, to be killed."""
    yield from started(make_world(make_cluster(tmp_path / "cluster"), tmp_path))


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[World]:
    """As `mortal`, with nodes that may be away for as long as a restart takes on a busy machine."""
    yield from started(make_world(make_cluster(tmp_path / "cluster"), tmp_path, agent_lost_s=60.0))


def started(made: World) -> Iterator[World]:
    made.start()
    yield made
    made.close()


@pytest.fixture
def client(world: World) -> Iterator[TrainClient]:
    """An operator's client."""
    with world.client() as made:
        yield made
