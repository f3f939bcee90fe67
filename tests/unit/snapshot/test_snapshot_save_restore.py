"""Save in one layout, restore in another: bit for bit, whatever the boxes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from saved_job import (
    DTYPES,
    draft,
    emptied,
    file_store,
    open_attempt,
    random_tensor,
    rows_of,
    same_bits,
    save,
    some_tensors,
    tilings,
    whole_of,
)

from phalanx.core.box import Box, HeldTensor, whole
from phalanx.core.errors import PhalanxError, Problems
from phalanx.lineage import Lineage, Manifest
from phalanx.objects import ObjectStore, open_store
from phalanx.snapshot import commit, load
from phalanx.snapshot.load import iterate
from phalanx.snapshot.restore import restore
from phalanx.snapshot.verify import verify
from phalanx.snapshot.writer import Writer


@pytest.mark.parametrize("before", [1, 2, 3, 5])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_restore_in_another_number_of_ranks_is_bit_equal(tmp_path: Path, before: int, after: int) -> None:
    """Case 13: another world size, optimizer state included."""
    tensors = some_tensors()
    store = file_store(tmp_path)
    manifest = save(store, open_attempt(store), 5, rows_of(tensors, before))
    restored = emptied(tensors)
    for held in rows_of(restored, after):
        restore(store, manifest, held, all_names=tensors.keys())
    assert all(same_bits(restored[name], tensors[name]) for name in tensors)
    assert verify(store, manifest) == ()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_restore_between_any_two_tilings_is_bit_equal(data: st.DataObject) -> None:
    """Case 13: uneven and empty boxes in 0 to 3 dimensions, replicas on both sides, small objects."""
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=3))
    tensors = {f"t{n}": random_tensor(s, data.draw(st.sampled_from(DTYPES)), n) for n, s in enumerate(shapes)}
    before = _held(data, tensors)
    restored = emptied(tensors)
    after = _held(data, restored)
    store = open_store("memory://")
    manifest = save(store, open_attempt(store), 1, before, object_bytes=data.draw(st.sampled_from([1, 64, 1 << 20])))
    for held in after:
        restore(store, manifest, held)
    loaded = dict(iterate(store, manifest.ref))
    for name, tensor in tensors.items():
        assert same_bits(restored[name], tensor)
        expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        assert np.array_equal(loaded[name].reshape(-1).view(np.uint8), _bytes(expected))


def _held(data: st.DataObject, tensors: dict[str, torch.Tensor]) -> list[list[HeldTensor]]:
    """A random layout over 3 ranks: each box of a random tiling on one rank, or on all three as replicas."""
    ranks: list[list[HeldTensor]] = [[], [], []]
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        for box in data.draw(tilings(shape)):
            local = tensor[whole(shape).slices_of(box)] if shape else tensor
            owner = data.draw(st.integers(0, 3))
            for rank in range(3) if owner == 3 else [owner]:
                if not any(held.name == name and held.box == box for held in ranks[rank]):
                    replicas = (rank, 3) if owner == 3 else (0, 1)
                    ranks[rank].append(HeldTensor(name, shape, box, local, *replicas))
    return ranks


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def test_save_then_change_keeps_the_values_of_the_call(tmp_path: Path) -> None:
    """Case 2: tensors changed in place right after `save` returned, again and again."""
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    tensors = some_tensors()
    writer = Writer(store, 0, 1)
    for step in range(1, 4):
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        pending = writer.save(attempt, step, whole_of(tensors))
        for tensor in tensors.values():
            tensor.zero_()
        pending.wait(30)
        manifest = _commit(store, attempt, step)
        restore(store, manifest, whole_of(tensors))
        assert all(same_bits(tensors[name], kept[name]) for name in tensors)
        tensors["optim.step"] += 1


def _commit(store: ObjectStore, attempt: int, step: int) -> Manifest:
    return commit(Lineage(store), store, draft(attempt, step), 1, 30)


def test_save_of_non_contiguous_tensors_is_bit_equal(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    tensors = {
        "t": random_tensor((9, 7), torch.float32, 1).t(),
        "u": random_tensor((8, 8), torch.bfloat16, 2)[::2, 1::3],
    }
    manifest = save(store, open_attempt(store), 1, [whole_of(tensors)])
    restored = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    restore(store, manifest, whole_of(restored))
    assert all(same_bits(restored[name], tensors[name]) for name in tensors)


def test_restore_of_one_shard_reads_only_its_share(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    tensors = {"t": random_tensor((4096, 1024), torch.float32, 1)}
    manifest = save(store, open_attempt(store), 1, [whole_of(tensors)])
    held = HeldTensor("t", (4096, 1024), Box((1024, 0), (1024, 1024)), torch.zeros(1024, 1024))
    report = restore(store, manifest, [held])
    assert same_bits(held.local, tensors["t"][1024:2048])
    assert report.read_bytes == 4 << 20


def test_restore_with_wrong_tensors_names_every_one_and_reads_nothing(tmp_path: Path) -> None:
    """Case 5."""
    store = file_store(tmp_path)
    manifest = save(
        store, open_attempt(store), 1, [whole_of({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)})]
    )
    ours = {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.bfloat16), "c": torch.zeros(5), "d": torch.zeros(1)}
    names = [*ours, "e"]
    with pytest.raises(Problems) as caught:
        restore(store, manifest, [*whole_of(ours)], all_names=[name for name in names if name != "a"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert any(line.startswith("a:") and "in the job" in line for line in lines)
    assert any(line.startswith("b ") and "bfloat16 [3]" in line and "float32 [3]" in line for line in lines)
    assert any(line.startswith("c ") and "float32 [5]" in line for line in lines)
    assert any(line.startswith("d:") and "in the checkpoint" in line for line in lines)
    assert ours["a"].sum() == 0


def test_restore_with_partial_leaves_only_the_named_tensors(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    manifest = save(store, open_attempt(store), 1, [whole_of({"a": torch.ones(2), "old": torch.ones(3)})])
    ours = {"a": torch.zeros(2), "new": torch.zeros(1)}
    with pytest.raises(PhalanxError, match="old"):
        restore(store, manifest, whole_of(ours), partial=["new"], all_names=ours)
    report = restore(store, manifest, whole_of(ours), partial=["new", "old"], all_names=ours)
    assert report.left_out == ("new", "old") and report.num_tensors == 1
    assert ours["a"].sum() == 2 and ours["new"].sum() == 0
    with pytest.raises(PhalanxError, match="nwe"):
        restore(store, manifest, whole_of(ours), partial=["new", "old", "nwe"], all_names=ours)


def test_replicas_save_writes_each_element_once(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    tensor = random_tensor((3000, 1000), torch.float32, 3)
    layout = [[HeldTensor("t", (3000, 1000), whole((3000, 1000)), tensor, rank, 4)] for rank in range(4)]
    save(store, open_attempt(store), 1, layout)
    sizes = [info.num_bytes for info in store.list("a00000001/") if info.key.endswith(".safetensors")]
    assert len(sizes) == 4 and sum(sizes) < 12_000_000 + 4 * 200 and max(sizes) - min(sizes) < 10_000


def test_objects_are_plain_safetensors_files_with_readable_names(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    tensors = {
        "model.w": random_tensor((4, 6), torch.bfloat16, 1),
        "optim.w.exp_avg": random_tensor((4, 6), torch.float32, 2),
    }
    save(store, open_attempt(store), 1, rows_of(tensors, 2))
    path = tmp_path / "a00000001/s00000001/objects/00000001-00000000.safetensors"
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == ["model.w[2:4,0:6]", "optim.w.exp_avg[2:4,0:6]"]
        assert same_bits(file.get_tensor("model.w[2:4,0:6]"), tensors["model.w"][2:])


def test_load_of_a_step_follows_the_live_chain(tmp_path: Path) -> None:
    """Case 14: what an older attempt commits late is not found."""
    store = file_store(tmp_path)
    lineage = Lineage(store)
    first = open_attempt(store)
    save(store, first, 5, [whole_of({"t": torch.full((2,), 5.0)})])
    save(store, first, 10, [whole_of({"t": torch.full((2,), 10.0)})])
    second = open_attempt(store, avoid=[ref for ref in lineage.checkpoints() if ref.step == 10])
    save(store, first, 15, [whole_of({"t": torch.full((2,), -1.0)})])
    save(store, second, 12, [whole_of({"t": torch.full((2,), 12.0)})])
    assert load(store.url)["t"].tolist() == [12.0, 12.0]
    assert load(store.url, 5)["t"].tolist() == [5.0, 5.0]
    for dead in (10, 15):
        with pytest.raises(PhalanxError, match="5, 12"):
            load(store.url, dead)


def test_import_of_the_package_brings_no_torch() -> None:
    code = "import sys, phalanx.snapshot; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
