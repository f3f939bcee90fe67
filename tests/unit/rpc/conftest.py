"""`cluster`: certificates and tokens in a folder of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.rpc.testing import Cluster, make_cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return make_cluster(tmp_path / "cluster")
