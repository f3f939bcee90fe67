"""The numerics contract for a user's own model and loss: every data axis, tensor and pipeline parallelism and recompute
give the loss, gradients and metrics of one fp32 process.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from own_parity import write_own_reference
from parity import names_of
from safetensors.torch import load_file

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang

pytestmark = pytest.mark.distributed

BOUND = 1e-5


def _case(*, recompute: str = "none", **parallel: Any) -> dict[str, Any]:
    return {"recompute": recompute, "parallel": parallel}


TABLE: dict[int, dict[str, dict[str, Any]]] = {
    1: {"zero1": _case(zero=1), "zero3_surplus": _case(local_batch_size=3), "recompute": _case(recompute="full")},
    2: {
        "dp2_zero1": _case(zero=1),
        "dp2_zero2": _case(zero=2),
        "dp2_recompute": _case(recompute="full"),
        "replicate2": _case(dp_replicate=2, zero=1),
        "tp2": _case(tp=2),
        "tp2_recompute": _case(tp=2, recompute="full"),
        "pp2_recompute": _case(pp=2, recompute="full"),
    },
    4: {
        "dp4_surplus": _case(local_batch_size=3),
        "hsdp_recompute": _case(dp_replicate=2, recompute="full"),
        "dp2_tp2": _case(tp=2),
        "pp2_dp2": _case(pp=2, schedule="interleaved_1f1b", stages_per_rank=2),
        "pp2_tp2": _case(pp=2, tp=2, schedule="zbv", stages_per_rank=2, zero=1),
    },
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("own") / "reference.safetensors")
    write_own_reference(path)
    return path


@pytest.mark.parametrize("world_size", TABLE)
def test_every_layout_of_an_own_model_is_one_process(fork_server: ForkServer, reference: str, world_size: int) -> None:
    arguments = {"cases": TABLE[world_size], "reference": reference}
    rows = run_gang(fork_server, world_size, "own_parity:run_own_table", arguments, timeout_s=110)[0]
    assert rows.keys() == TABLE[world_size].keys()
    expected = load_file(reference)
    loss, accuracy = float(expected["loss"]), float(expected["accuracy"])
    norm = math.sqrt(sum(float(expected[f"gradient/{name}"].square().sum()) for name in names_of(expected)))
    for name, row in rows.items():
        assert row["weights_equal"], name
        assert row["losses"] == pytest.approx([loss] * 4, rel=BOUND), name
        assert row["norm"] == pytest.approx(norm, rel=BOUND), name
        assert row["metrics"] == {"accuracy": pytest.approx(accuracy, rel=BOUND)}, name
        assert max(row["gradient_errors"].values()) <= BOUND, (name, row["gradient_errors"])
