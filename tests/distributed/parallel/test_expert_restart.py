"""Experts saved by ranks of one ep size and restored by those of another: the same bits, of moments too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_expert_parity import _of
from test_parity import _case, _pipeline

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang

pytestmark = pytest.mark.distributed

CASES = {
    "ep2": _of("deepseek", _case(ep=2)),
    "ep4": _of("deepseek", _case(ep=4)),
    "ep1": _of("deepseek", _case()),
    "ep2_tp2": _of("deepseek", _case(ep=2, tp=2)),
    "ep2_pp2": _of("deepseek", _pipeline("1f1b", pp=2, ep=2)),
}


def test_checkpoint_of_one_ep_size_restores_into_another_bit_for_bit(fork_server: ForkServer, tmp_path: Path) -> None:
    arguments = {"cases": CASES, "url": (tmp_path / "store").as_uri(), "folder": str(tmp_path)}
    ranks = run_gang(fork_server, 4, "expert_restart:run_restart", arguments, timeout_s=110)
    assert [rank["ep2"] for rank in ranks] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert [rank["ep4"] for rank in ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]], "others than before, in two ranks"
    saved = load_file(tmp_path / "ep2.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    for name in CASES:
        found = load_file(tmp_path / f"{name}.safetensors")
        assert found.keys() == saved.keys(), name
        assert all(torch.equal(found[each], saved[each]) for each in saved), name
