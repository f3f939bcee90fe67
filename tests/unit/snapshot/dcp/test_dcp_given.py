"""What a program gives that cannot be saved or loaded is refused by name, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import blank, url_of
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.core.errors import PhalanxError, Problems
from phalanx.lineage import CheckpointRef
from phalanx.snapshot.dcp import PhalanxReader, PhalanxWriter, async_save, latest_step, load, save
from phalanx.snapshot.load import load as load_arrays

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NO_STEPS = [-1, 1.5, 600.0, "two", "600", True, np.True_, np.int64(-1), np.float64(6), 10**8, 10**9]


@pytest.mark.parametrize("step", NO_STEPS)
def test_step_that_is_none_is_refused(tmp_path: Path, step: Any) -> None:
    url, state = url_of(tmp_path), {"v": torch.ones(2)}
    calls: list[Callable[[], object]] = [
        lambda: PhalanxWriter(url, step),
        lambda: PhalanxReader(url, step),
        lambda: save(state, url, step=step),
        lambda: async_save(state, url, step=step),
        lambda: load(state, url, step),
        lambda: load_arrays(url, step),
    ]
    for call in calls:
        with pytest.raises(PhalanxError, match="expected a whole number"):
            call()
    assert not list(tmp_path.iterdir())


def test_step_may_be_an_integer_of_numpys(tmp_path: Path) -> None:
    url, state = url_of(tmp_path), {"v": torch.ones(2)}
    assert save(state, url, step=np.int32(6)) == CheckpointRef(1, 6)  # type: ignore[arg-type]
    assert load(blank(state), url, np.int64(6)) == CheckpointRef(1, 6)  # type: ignore[arg-type]
    with pytest.raises(PhalanxError, match="expected a whole number"):
        save(state, url, step=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["-1", "1.5", "two", "", "100000000", True, 10**8])
def test_torch_save_with_an_id_that_is_no_step_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(PhalanxError, match="expected a whole number"):
        dcp.save({"v": torch.ones(2)}, storage_writer=PhalanxWriter(url_of(tmp_path)), checkpoint_id=name)
    assert not list(tmp_path.iterdir())


def unstorable() -> dict[str, torch.Tensor]:
    """Tensors whose elements no checkpoint can hold, of types that one can."""
    with FakeTensorMode():
        fake = torch.ones(2)
    return {
        "sparse_coo": torch.ones(2).to_sparse(),
        "sparse_csr": torch.ones(2, 2).to_sparse_csr(),
        "mkldnn": torch.ones(2).to_mkldnn(),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "meta": torch.ones(2, device="meta"),
        "lazy": torch.nn.UninitializedParameter(),
        "fake": fake,
    }


def names_in(error: PhalanxError) -> list[str]:
    assert isinstance(error, Problems), error
    return [problem.where for problem in error.problems]


def test_everything_that_cannot_be_saved_is_named_at_once(tmp_path: Path) -> None:
    state = {"set": {3}, "phase": torch.zeros(2, dtype=torch.complex64), "meta": torch.ones(2, device="meta"), "ok": 1}
    with pytest.raises(Problems) as caught:
        save(state, url_of(tmp_path), step=1)
    assert sorted(names_in(caught.value)) == ["meta", "phase", "set"]
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_tensors_that_no_checkpoint_can_hold_are_all_named_and_nothing_is_written(tmp_path: Path) -> None:
    url, state = url_of(tmp_path), {"m": unstorable()}
    with pytest.raises(Problems) as saved:
        save(state, url, step=1)
    saving = async_save(state, url, step=1)
    with pytest.raises(Problems) as saved_in_background:
        saving.result(60)
    assert not list(tmp_path.iterdir())
    save({"m": {name: torch.ones(2) for name in state["m"]}}, url, step=1)
    with pytest.raises(Problems) as loaded:
        load(state, url)
    for caught in (saved, saved_in_background, loaded):
        assert names_in(caught.value) == [f"m.{name}" for name in state["m"]]
    assert "m.sparse_coo is 'a tensor of the layout sparse_coo': expected a dense tensor" in str(saved.value)
    assert "m.meta is 'a tensor on the meta device': expected one with elements in memory" in str(saved.value)


def test_save_in_the_background_after_a_refused_one_saves(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with pytest.raises(Problems, match="v is 'a tensor on the meta device'"):
        async_save({"v": torch.ones(2, device="meta")}, url, step=1).result(60)
    assert async_save({"v": torch.ones(2)}, url, step=1).result(60) == CheckpointRef(1, 1)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_save_of_a_quantized_tensor_names_it(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(Problems, match="v is 'qint8'"):
        save({"v": quantized}, url_of(tmp_path), step=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tensor", [torch.ones(2).to_sparse(), torch.ones(2, device="meta")], ids=["sparse", "meta"])
def test_torch_save_of_a_tensor_that_no_checkpoint_can_hold_names_it(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"v": tensor}, storage_writer=PhalanxWriter(url_of(tmp_path), 1))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, PhalanxError) and "v is 'a tensor o" in str(error)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_two_values_of_one_name_are_refused_by_it(tmp_path: Path) -> None:
    url, state = url_of(tmp_path), {"v": {"a.b": 1, "a": {"b": 2}}, "w": {1: 1, "1": 2}}
    with pytest.raises(Problems) as saved:
        save(state, url, step=1)
    assert not list(tmp_path.iterdir())
    save({"v": 1, "w": 2}, url, step=1)
    with pytest.raises(Problems) as loaded:
        load(state, url)
    assert names_in(saved.value) == names_in(loaded.value) == ["v.a.b", "w.1"]
    assert "['v', 'a.b'] and ['v', 'a', 'b']" in str(saved.value)


@pytest.mark.parametrize("name", ["", "__metadata__", "\ud800"])
def test_name_that_no_tensor_can_have_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    url, state = url_of(tmp_path), {name: torch.ones(2)}
    with pytest.raises(Problems) as saved:
        save(state, url, step=1)
    with pytest.raises(Problems) as saved_in_background:
        async_save(state, url, step=1).result(60)
    with pytest.raises(dcp.CheckpointException) as saved_by_torch:
        dcp.save(state, storage_writer=PhalanxWriter(url, 1))
    ((by_torch, _),) = saved_by_torch.value.failures.values()
    for error in (saved.value, saved_in_background.value, by_torch):
        assert f"the name {name!r} of a tensor: expected a text" in str(error)
    assert not list(tmp_path.rglob("*.json")) and not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("empty", [{}, {"layers": {}}], ids=["dict", "nested"])
def test_key_with_nothing_below_it_has_no_place_for_what_the_checkpoint_has_there(tmp_path: Path, empty: Any) -> None:
    url = url_of(tmp_path)
    save({"model": {"layers": {"w": torch.ones(2)}}, "epoch": 3}, url, step=1)
    with pytest.raises(Problems, match="expected a place for it in the state dict") as caught:
        load({"model": empty}, url)
    assert names_in(caught.value) == ["model.layers.w"]
    load({"model": empty}, url, partial=["model.layers.w"])


def test_state_that_holds_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["v"] = state
    with pytest.raises(PhalanxError, match="don't hold themselves"):
        save(state, url_of(tmp_path), step=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "state", [[1], None, torch.ones(2), torch.nn.Linear(1, 1)], ids=["list", "None", "tensor", "module"]
)
def test_state_that_is_no_dict_is_refused(tmp_path: Path, state: Any) -> None:
    url = url_of(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: save(state, url, step=1),
        lambda: async_save(state, url, step=1),
        lambda: load(state, url),
    ]
    for call in calls:
        with pytest.raises(PhalanxError, match=f"state dict is 'a {type(state).__name__}': expected a dict"):
            call()


@pytest.mark.parametrize("url", [None, Path("/nowhere"), b"file:///nowhere"])
def test_url_that_is_no_text_is_refused(url: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: save({"v": 1}, url, step=1),
        lambda: async_save({"v": 1}, url, step=1),
        lambda: load({"v": 1}, url),
        lambda: load_arrays(url),
        lambda: latest_step(url),
    ]
    for call in calls:
        with pytest.raises(PhalanxError, match="storage URL is"):
            call()


@pytest.mark.parametrize("partial", ["model.bias", b"model.bias", 5, [5], [None]])
def test_partial_that_is_no_list_of_names_is_refused(tmp_path: Path, partial: Any) -> None:
    with pytest.raises(PhalanxError, match=r"expected a list of names.*write partial=\["):
        load({"v": 1}, url_of(tmp_path), partial=partial)
