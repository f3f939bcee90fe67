"""The numerics contract of mixtures of experts: every layout gives the loss, the gradients (with those of the loss of
balance) and the counts of one fp32 process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from parity import write_reference
from test_parity import COMPILE_TIMEOUT_S, _case, _check_table, _gangs, _pipeline

from phalanx.gang.fork_server import ForkServer

pytestmark = pytest.mark.distributed

# The loss of balance weighs as much as the model's own, so that what is wrong in it shows.
MIXTRAL = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 24, "aux_loss": 1.0}
DEEPSEEK = {
    "num_experts": 8,
    "top_k": 3,
    "expert_ffn_dim": 8,
    "num_shared_experts": 1,
    "score": "sigmoid",
    "route_scale": 2.5,
    "num_groups": 4,
    "top_groups": 2,
    "selection_bias": True,
    "aux_loss": 1.0,
}
SPARSE = {"num_experts": 31, "top_k": 1, "expert_ffn_dim": 8, "normalise": False, "aux_loss": 1.0}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"ffn_dim": 0, "moe": MIXTRAL},
    "deepseek": {"ffn_dim": 0, "moe": DEEPSEEK, "qk_norm": True},
    "many": {"ffn_dim": 0, "moe": SPARSE | {"num_experts": 32}},
    "sparse": {"ffn_dim": 0, "moe": SPARSE},  # experts without tokens; shards of them uneven
}


def _of(reference: str, case: dict[str, Any]) -> dict[str, Any]:
    return case | {"reference": reference, "model": MODELS[reference]}


SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
TABLE: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one": _of("mixtral", _case()),
        "one_deepseek": _of("deepseek", _case()),
        "sparse_surplus": _of("sparse", _case(local_batch_size=3)),
        "recompute": _of("deepseek", _case(recompute="full", zero=1)),
    },
    2: {
        "dp2": _of("mixtral", _case()),
        "dp2_deepseek_zero1": _of("deepseek", _case(zero=1)),
        "dp2_sparse_zero2_surplus": _of("sparse", _case(zero=2, local_batch_size=3)),
        "replicate2": _of("mixtral", _case(dp_replicate=2)),
        "tp2": _of("mixtral", _case(tp=2)),
        "tp2_deepseek_recompute": _of("deepseek", _case(tp=2, recompute="full")),
        "cp2": _of("deepseek", _case(cp=2)),
        "ep2": _of("mixtral", _case(ep=2)),
        "ep2_recompute_zero1": _of("deepseek", _case(ep=2, zero=1, recompute="full")),
        "ep2_many_zero2_surplus": _of("many", _case(ep=2, zero=2, local_batch_size=3)),
        "cp2_ep2": _of("deepseek", _case(cp=2, ep=2)),
        **{f"pp2_{schedule}": _of("deepseek", _pipeline(schedule, pp=2)) for schedule in SCHEDULES},
    },
    4: {
        "dp4_sparse": _of("sparse", _case()),
        "dp2_tp2": _of("deepseek", _case(tp=2, zero=2)),
        "pp2_tp2": _of("mixtral", _pipeline("1f1b", pp=2, tp=2)),
        "pp2_dp2": _of("deepseek", _pipeline("interleaved_1f1b", pp=2)),
        "cp2_tp2_a2a": _of("mixtral", _case(cp=2, tp=2, cp_comm_type="a2a")),
        "hsdp": _of("deepseek", _case(dp_replicate=2)),
        "dp4_ep2": _of("deepseek", _case(ep=2)),
        "ep4_many": _of("many", _case(ep=4)),
        "dp2_tp2_ep2": _of("deepseek", _case(tp=2, ep=2)),
        "hsdp_ep2": _of("deepseek", _case(dp_replicate=2, ep=2)),
        "pp2_ep2": _of("deepseek", _pipeline("1f1b", pp=2, ep=2)),
        "pp2_ep2_zbv": _of("mixtral", _pipeline("zbv", pp=2, ep=2)),
        "pp2_ep2_zbv_recompute": _of("deepseek", _pipeline("zbv", pp=2, ep=2, recompute="full")),
    },
    8: {
        "pp2_dp2_tp2_ep2": _of("deepseek", _pipeline("interleaved_1f1b", pp=2, tp=2, ep=2)),
        "hsdp_tp2_ep2": _of("mixtral", _case(dp_replicate=2, tp=2, ep=2)),
    },
}
COMPILED = {
    "ep2": _of("mixtral", _case(ep=2)) | {"compile": True},
    "ep2_recompute": _of("deepseek", _case(ep=2, zero=1, recompute="full")) | {"compile": True},
}


def references_in(folder: Path, models: Mapping[str, Any]) -> dict[str, str]:
    """Files that one process writes of each model, by its name."""
    paths = {name: str(folder / f"{name}.safetensors") for name in models}
    for name, model in models.items():
        write_reference(paths[name], model)
    return paths


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return references_in(tmp_path_factory.mktemp("references"), MODELS)


@pytest.mark.parametrize(("world_size", "names"), _gangs(TABLE))
def test_every_layout_of_experts_gives_loss_gradients_and_counts_of_one_process(
    fork_server: ForkServer, references: dict[str, str], world_size: int, names: list[str]
) -> None:
    _check_table(fork_server, references, world_size, {name: TABLE[world_size][name] for name in names})


@pytest.mark.long
@pytest.mark.timeout(COMPILE_TIMEOUT_S)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_of_experts_give_loss_gradients_and_counts_of_one_process(
    fork_server: ForkServer, references: dict[str, str], name: str
) -> None:
    _check_table(fork_server, references, 2, {name: COMPILED[name]}, COMPILE_TIMEOUT_S - 10)
