"""What replicas tell each other over slow links, against torch's own parts in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import SEED
from replica_training import STEPS, locally_trained, trained_by_powersgd, trained_by_signs
from safetensors.torch import load_file

from phalanx.core.box import HeldTensor, whole
from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang
from phalanx.parallel.replicas import ReplicaLink
from phalanx.trainer.onebit import BLOCK
from phalanx.trainer.powersgd import PowerSgd

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


def compressed(**keys: Any) -> dict[str, Any]:
    return {"sections": {"gradient_compression": keys}, "parallel": {"dp_replicate": 4, "zero": 1}}


RANK, WARMUP = 2, 2
COMPRESSED = {
    "powersgd": compressed(method="powersgd", rank=RANK, compressed="matrices", warmup_steps=0),
    "powersgd of hidden matrices": compressed(method="powersgd", rank=RANK, compressed="hidden", warmup_steps=0),
    "onebit_adam": compressed(method="onebit_adam", warmup_steps=WARMUP),
    "powersgd over shards": compressed(method="powersgd", rank=RANK, warmup_steps=1)
    | {"parallel": {"dp_replicate": 2, "zero": 2}},
    "onebit_adam over shards": compressed(method="onebit_adam", warmup_steps=WARMUP)
    | {"parallel": {"dp_replicate": 2, "zero": 3}},
}


@pytest.fixture(scope="module")
def rows(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What four ranks came to in each case: reports, and tensors by case in a folder."""
    folder = Path(tmp_path_factory.mktemp("replicas"))
    arguments = {"cases": LOCAL | COMPRESSED, "folder": str(folder)}
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
    for name in LOCAL:
        row = rows[0][name]
        steps = LOCAL[name]["sections"]["local_updates"]["steps"]
        expected = [3 * row["held_bytes"] if step % steps == 0 or step == STEPS else 0 for step in range(1, STEPS + 1)]
        assert row["bytes"] == expected, name


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        assert (found[tensor] - value).norm() <= bound * value.norm(), tensor


@pytest.mark.parametrize("name", ["powersgd", "powersgd of hidden matrices"])
def test_powersgd_equals_whole_matrices_in_one_process(rows: tuple[dict[str, Any], Path], name: str) -> None:
    found = load_file(rows[1] / f"{name}.safetensors")
    held = [
        HeldTensor(tensor, tuple(value.shape), whole(tuple(value.shape)), torch.zeros(value.shape))
        for tensor, value in found.items()
        if not tensor.startswith("optim.")
    ]
    chosen = COMPRESSED[name]["sections"]["gradient_compression"]["compressed"]
    power = PowerSgd(ReplicaLink(None), held, RANK, SEED, chosen)
    queries = {held[i].name: query for i, query in power._queries.items()}
    assert len(queries) > 20
    assert any(tensor in queries for tensor in ("tok_embeddings.weight", "output.weight")) == (chosen == "matrices")
    assert_same(found, trained_by_powersgd(4, RANK, queries), 1e-3)
    ends = sum(16 * each.local.numel() for each in held if not each.name.startswith("layers."))
    kept = ends if chosen == "hidden" else 0
    plain = rows[0][name]["held_bytes"]
    assert all(kept < sent < kept + (plain - kept) / 3 for sent in rows[0][name]["bytes"])


def test_onebit_adam_equals_unpacked_signs_in_one_process(rows: tuple[dict[str, Any], Path]) -> None:
    row = rows[0]["onebit_adam"]
    expected = trained_by_signs(4, WARMUP, BLOCK)
    assert_same(load_file(rows[1] / "onebit_adam.safetensors"), expected, 1e-3)
    plain = row["held_bytes"]
    assert row["bytes"][:WARMUP] == [plain] * WARMUP
    # Bits and a scale of 16 a block, to the servers and from them to each.
    bits = 8 * row["bytes"][WARMUP] / (plain / 4)
    assert bits == pytest.approx((1 + 16 / BLOCK) * 5 / 4, rel=0.03)


@pytest.mark.parametrize("name", [name for name in COMPRESSED if "shards" in name])
def test_replicas_of_shards_hold_one_model_and_tell_less(rows: tuple[dict[str, Any], Path], name: str) -> None:
    for tensor, value in load_file(rows[1] / f"{name}.safetensors").items():
        assert torch.isfinite(value).all(), f"{tensor}: its holders differ"
    sent = rows[0][name]["bytes"]
    assert sent[0] == rows[0][name]["held_bytes"] and 0 < sent[-1] < sent[0] / 3
