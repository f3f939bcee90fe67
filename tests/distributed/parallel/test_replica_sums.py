"""Gradients summed over replicas that hold the model whole equal those of torch's DistributedDataParallel."""

from __future__ import annotations

import pytest

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_equal_torchs_also_where_ranks_use_other_layers(fork_server: ForkServer, world_size: int) -> None:
    for row in run_gang(fork_server, world_size, "replica_sums:run_sums", timeout_s=90):
        assert row["differs"], "the batches should take different ways"
        assert row["worst"] < 1e-5
