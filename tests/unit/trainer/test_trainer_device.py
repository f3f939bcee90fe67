"""The rank's device and what deterministic kernels need before CUDA starts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from phalanx.trainer.device import open_device

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def nondeterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_rank_tells_cublas_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)
    assert open_device("cpu", deterministic=True) == torch.device("cpu")
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ[WORKSPACE] == ":4096:8"


def test_deterministic_rank_keeps_the_users_own_work_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    open_device("cpu", deterministic=True)
    assert os.environ[WORKSPACE] == ":16:8"


def test_other_rank_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    open_device("cpu", deterministic=False)
    assert WORKSPACE not in os.environ
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_is_the_one_of_the_local_rank_and_current(monkeypatch: pytest.MonkeyPatch) -> None:
    last = torch.cuda.device_count() - 1
    monkeypatch.setenv("LOCAL_RANK", str(last))
    device = open_device("cuda", deterministic=False)
    assert device == torch.device("cuda", last)
    assert torch.cuda.current_device() == last
