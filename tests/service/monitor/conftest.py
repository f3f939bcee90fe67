"""A cluster, a train of the test, and a monitor process that hears it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from monitor_kit import Exporter, Hook, Monitor, Train, serve_train

from phalanx.rpc.testing import Cluster, make_cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return make_cluster(tmp_path / "cluster")


@pytest.fixture
def train(cluster: Cluster) -> Iterator[Train]:
    train = Train()
    with serve_train(cluster, train) as server:
        train.address = server.address
        yield train


@pytest.fixture
def make_monitor(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Monitor]]:
    made = []

    def make(**settings: Any) -> Monitor:
        monitor = Monitor(cluster, tmp_path, **settings)
        made.append(monitor)
        return monitor.start()

    yield make
    for monitor in made:
        monitor.end()


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Exporter]:
    exporter = Exporter(tmp_path)
    yield exporter
    exporter.end()


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.end()
