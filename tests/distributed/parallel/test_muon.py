"""Muon in every kind of layout: the bits of one process, also where another layout's state was restored; of attention
with keys and values of its own and with latent ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from muon_ranks import RESTORED_AT, STEPS, drawn, muon_job, run_steps
from safetensors.torch import load_file, save_file

from phalanx.core.box import HeldTensor, whole
from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang
from phalanx.parallel import parameter_shapes
from phalanx.parallel.replicas import ReplicaLink
from phalanx.trainer.optimizer import optimizer_of

pytestmark = pytest.mark.distributed

# Latent attention's widths are all different, so that none can stand for another.
MLA = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
SIZES = {"vocab_size": 92, "n_layers": 5}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": SIZES | {"qk_norm": True},
    "latent": SIZES | {"n_kv_heads": 4, "mla": MLA},
}
TABLE: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {
        "dp2": {},
        "dp2_zero1": {"zero": 1},
        "replicate2": {"dp_replicate": 2},
        "tp2": {"tp": 2},
        "cp2": {"cp": 2},
        "pp2": {"pp": 2},
    },
    4: {
        "dp4": {},
        "hsdp": {"dp_replicate": 2},
        "dp2_tp2": {"tp": 2},
        "tp4_shared_heads": {"tp": 4, "dp_shard": 1},
        "pp2_dp2": {"pp": 2},
        "pp2_tp2_zbv": {"pp": 2, "tp": 2, "zero": 1, "schedule": "zbv"},
    },
}


def _cases(world_size: int, model: str) -> dict[str, dict[str, Any]]:
    return {name: {"model": MODELS[model], "parallel": parallel} for name, parallel in TABLE[world_size].items()}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """By model: weights and state of one process at the start, at the step that is restored, and at the end."""
    return {name: _reference(MODELS[name], tmp_path_factory.mktemp(name)) for name in MODELS}


def _reference(model: dict[str, Any], folder: Path) -> dict[str, str]:
    job = muon_job({"model": model, "world_size": 1})
    held = [
        HeldTensor(name, shape, whole(shape), drawn(name, shape, 0)) for name, shape in parameter_shapes(job).items()
    ]
    optimizer = optimizer_of(job, held, ReplicaLink(None))
    paths = {}
    for start, stop in ((0, 0), (0, RESTORED_AT), (RESTORED_AT, STEPS)):
        run_steps(optimizer, held, range(start + 1, stop + 1))
        paths[str(stop)] = str(folder / f"{stop}.safetensors")
        save_file({each.name: each.local.detach().clone() for each in [*held, *optimizer.state()]}, paths[str(stop)])
    return paths


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("world_size", list(TABLE))
def test_every_layout_applies_the_bits_of_one_process_and_goes_on_from_its_state(
    fork_server: ForkServer, references: dict[str, dict[str, str]], world_size: int, model: str
) -> None:
    arguments = {"cases": _cases(world_size, model), "references": references[model]}
    rows = run_gang(fork_server, world_size, "muon_ranks:run_layouts", arguments, timeout_s=100)[0]
    assert rows.keys() == TABLE[world_size].keys()
    wrong = {name: row for name, row in rows.items() if row != [[], []]}
    assert not wrong


@pytest.mark.parametrize("model", list(MODELS))
def test_the_reference_changes_what_it_is_compared_by(references: dict[str, dict[str, str]], model: str) -> None:
    start, end = load_file(references[model]["0"]), load_file(references[model][str(STEPS)])
    assert all(not torch.equal(start[name], end[name]) for name in start)
