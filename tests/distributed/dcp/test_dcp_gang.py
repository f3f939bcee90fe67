"""The door for torch.distributed.checkpoint with several gloo ranks: any number of them saves, any other loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_ranks import whole_tensors
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import open_store
from phalanx.snapshot.dcp import PhalanxReader, load, save
from phalanx.snapshot.verify import verify

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
TIMEOUT_S = 200.0


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def saved_by_four(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of ranks that follow four that saved steps 1 and 2."""
    folder = tmp_path_factory.mktemp("dcp")
    arguments = {"url": f"file://{folder}/job", "folder": str(folder)}
    results = run_gang(fork_server, 4, "dcp_ranks:saved", arguments, timeout_s=TIMEOUT_S)
    assert [result["refs"] for result in results] == [[[1, 1], [1, 2]]] * 4
    return arguments


def blank_state(url: str, step: int) -> dict[str, Any]:
    """A plain state dict with a place for everything in the checkpoint."""
    state: dict[str, Any] = {}
    metadata = PhalanxReader(url, step).read_metadata()
    for name, path in metadata.planner_data.items():
        place, stored = state, metadata.state_dict_metadata[name]
        for key in path[:-1]:
            place = place.setdefault(str(key), {})
        is_tensor = isinstance(stored, TensorStorageMetadata)
        place[str(path[-1])] = torch.zeros(stored.size, dtype=stored.properties.dtype) if is_tensor else None
    return state


def test_fsdp2_state_of_four_ranks_is_whole_and_loads_bit_equal_in_one_process(saved_by_four: dict[str, Any]) -> None:
    """Cases 2 and 13: the background save holds the values of its moment, though training went on beside it."""
    url, folder = saved_by_four["url"], Path(saved_by_four["folder"])
    store = open_store(url)
    for step in (1, 2):
        manifest = Lineage(store).manifest(CheckpointRef(1, step))
        assert manifest.world_size == 4 and verify(store, manifest) == ()
        state = blank_state(url, step)
        load(state, url, step)
        assert state["step"] == step and state["optim"]["param_groups"]["0"]["betas"] == (0.9, 0.999)
        assert same(whole_tensors(state), load_file(folder / f"{step}.safetensors"))


def test_fsdp2_state_of_four_ranks_loads_bit_equal_in_two_and_goes_on(
    fork_server: ForkServer, saved_by_four: dict[str, Any]
) -> None:
    """Case 13: optimizer included; the second start of the program is the second attempt."""
    results = run_gang(fork_server, 2, "dcp_ranks:loaded", saved_by_four, timeout_s=TIMEOUT_S)
    assert [(result["ref"], result["step"]) for result in results] == [([1, 1], 1)] * 2
    folder = Path(saved_by_four["folder"])
    assert same(load_file(folder / "found.safetensors"), load_file(folder / "1.safetensors"))
    lineage = Lineage(open_store(saved_by_four["url"]))
    assert lineage.checkpoints() == (CheckpointRef(1, 1), CheckpointRef(2, 2))


def test_ranks_all_hear_what_one_failed_with_and_go_on(fork_server: ForkServer, tmp_path: Path) -> None:
    """Cases 5, 7 and 12."""
    damaged = f"file://{tmp_path}/damaged"
    save({"model": {"w": torch.ones(3)}}, damaged, step=1)
    (path,) = (tmp_path / "damaged").rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    arguments = {"url": f"file://{tmp_path}/job", "damaged": damaged}
    results = run_gang(fork_server, 2, "dcp_ranks:refused", arguments, timeout_s=TIMEOUT_S)
    told = results[0]["told"]
    assert results[1]["told"] == told
    assert told["value"].startswith("Problems: bad") or told["value"].startswith("Problems: good")
    assert told["missing"].startswith("Problems: y")
    assert told["damage"].startswith("DamagedCheckpoint") and "model.w" in told["damage"]
    assert "committed checkpoint" in told["nothing"] and told["nothing"].startswith("PhalanxError")
    assert "Missing key in checkpoint state_dict: y" in told["torch"]
    there, here = results[0]["heard"], results[1]["heard"]
    assert here.keys() == there.keys() == {"kind", "step", "url"}
    assert here["kind"].startswith("state dict is") and here["step"].startswith("step is '6'")
    assert here["url"].startswith("storage URL is '7'")
    assert all(text.startswith("the call on rank 1 is ") and here[name][:8] in text for name, text in there.items())


def test_background_failure_that_one_rank_has_heard_is_raised_once_on_all(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Case 3."""
    results = run_gang(fork_server, 2, "dcp_ranks:unheard", {"url": f"file://{tmp_path}/job"}, timeout_s=TIMEOUT_S)
    assert [result["heard"] for result in results] == [2, 1]
    assert [result["ref"] for result in results] == [[1, 2]] * 2


def test_saves_of_several_ranks_that_nobody_waits_for_are_made_in_the_order_of_the_calls(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/job"
    run_gang(fork_server, 2, "dcp_ranks:in_line", {"url": url}, timeout_s=TIMEOUT_S)
    assert Lineage(open_store(url)).checkpoints() == tuple(CheckpointRef(1, step) for step in range(1, 5))
    for step in range(1, 5):
        state = {"rank0": torch.zeros(3, dtype=torch.int64), "rank1": torch.zeros(3, dtype=torch.int64)}
        load(state, url, step)
        assert same(state, {name: torch.full((3,), step) for name in state})
