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
    made = make_world(make_cluster(tmp_path / "cluster"), tmp_path)
    made.start()
    yield made
    made.close()


@pytest.fixture
def client(world: World) -> Iterator[TrainClient]:
    """An operator's client."""
    with world.client() as made:
        yield made
