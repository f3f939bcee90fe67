"""What replicas tell each other over slow links, against torch's own parts in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replica_training import STEPS, locally_trained
from safetensors.torch import load_file

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang

pytestmark = pytest.mark.distributed

BOUND, EPSILON = 2e-5, 2.0**-23


def local(steps: int, outer_lr: float = 0.7, outer_momentum: float = 0.9, **parallel: Any) -> dict[str, Any]:
    keys = {"steps": steps, "outer_lr": outer_lr, "outer_momentum": outer_momentum}
    return {"sections": {"local_updates": keys}, "parallel": {"dp_replicate": 2, **parallel}}


LOCAL = {
    "every two": local(2),
    "uneven last round": local(3, zero=1),
    "plain averaging": local(2, 1.0, 0.0, cp=2),
    "tensor parallel": local(2, tp=2),
    "pipeline": local(2, pp=2),
}


@pytest.fixture(scope="module")
def rows(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What four ranks came to in each case: reports, and tensors by case in a folder."""
    folder = Path(tmp_path_factory.mktemp("replicas"))
    arguments = {"cases": LOCAL, "folder": str(folder)}
    return run_gang(fork_server, 4, "replica_training:run_training", arguments, timeout_s=110)[0], folder


@pytest.mark.parametrize("name", list(LOCAL))
def test_local_updates_equal_torchs_adamw_in_each_replica_and_its_nesterov_sgd_outside(
    rows: tuple[dict[str, Any], Path], name: str
) -> None:
    keys, parallel = LOCAL[name]["sections"]["local_updates"], LOCAL[name]["parallel"]
    dp_size = 2 if parallel.keys() & {"tp", "cp", "pp"} else 4
    expected = locally_trained(2, dp_size, keys["steps"], keys["outer_lr"], keys["outer_momentum"])
    found = load_file(rows[1] / f"{name}.safetensors")
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        # The outer momentum is a sum of differences of weights, so it has their rounding.
        weights = expected.get(tensor.removeprefix("optim.").removesuffix(".outer_momentum"), value)
        bound = BOUND * value.norm() + (EPSILON * weights.norm() if "outer" in tensor else 0.0)
        assert (found[tensor] - value).norm() <= bound, tensor


def test_replicas_tell_each_other_only_at_the_end_of_a_round_and_each_byte_is_counted(
    rows: tuple[dict[str, Any], Path],
) -> None:
    for name, row in rows[0].items():
        steps = LOCAL[name]["sections"]["local_updates"]["steps"]
        expected = [3 * row["held_bytes"] if step % steps == 0 or step == STEPS else 0 for step in range(1, STEPS + 1)]
        assert row["bytes"] == expected, name
