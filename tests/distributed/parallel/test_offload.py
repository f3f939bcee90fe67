"""CPU offload changes where the state lies and not one bit of what is learnt."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang

pytestmark = pytest.mark.distributed


EXPERTS = {"ffn_dim": 0, "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_dim": 16, "aux_loss": 0.01}}


def _case(reference: str = "base", *, dtype: str = "float32", **parallel: Any) -> dict[str, Any]:
    model = {"base": {}, "tied": {"tie_embeddings": True}, "experts": EXPERTS}[reference]
    return {"reference": reference, "model": model, "dtype": dtype, "parallel": parallel}


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": _case(), "one_bf16": _case(dtype="bfloat16")},
    2: {
        **{f"dp2_zero{zero}": _case(zero=zero) for zero in (1, 2, 3)},
        "replicate2": _case(dp_replicate=2),
        "replicate2_zero1": _case(dp_replicate=2, zero=1),
        "tp2": _case(tp=2),
        "cp2": _case(cp=2),
        "pp2": _case(pp=2),
        "pp2_tied": _case("tied", pp=2),
        "dp2_experts": _case("experts"),
        "ep2": _case("experts", ep=2),
        "pp2_zbv": _case(pp=2, schedule="zbv", stages_per_rank=2, zero=1),
    },
    4: {
        "hsdp": _case(dp_replicate=2),
        "hsdp_tp2_bf16": _case(dp_replicate=2, tp=2, dtype="bfloat16"),
        "hsdp_ep2": _case("experts", dp_replicate=2, ep=2),
    },
}


@pytest.mark.parametrize("world_size", CASES)
def test_offloaded_training_is_the_same_bit_for_bit(fork_server: ForkServer, world_size: int) -> None:
    cases = CASES[world_size]
    for rows in run_gang(fork_server, world_size, "offload:run_offload", {"cases": cases}, timeout_s=110):
        assert rows == {
            name: {"same": True, "num_tensors": 4, "changed": True, "told": [False, True]} for name in cases
        }
