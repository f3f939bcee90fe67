"""`phalanx.snapshot.load` and `opened`: what a notebook asks for is read, nothing else; on files and on S3."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saved_job import draft, file_store, open_attempt, random_tensor, rows_of, save

from phalanx.checkpoint.place import find_job
from phalanx.checkpoint.pruning import prune
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import ObjectStore, open_store
from phalanx.objects.faults import FaultyStore, delay, on
from phalanx.snapshot import DamagedCheckpoint, commit, load, opened
from phalanx.snapshot.load import Tensors
from phalanx.snapshot.lookup import Lookup
from phalanx.snapshot.writer import Writer


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return file_store(tmp_path) if request.param == "file" else open_store(request.getfixturevalue("s3_prefix"))


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    found = {f"model.layers.{n}.w": random_tensor((64, 50), torch.float32, seed + n) for n in range(3)}
    return {**found, "model.half": torch.randn(5, 3).bfloat16(), "optim.layers.0.w.exp_avg": torch.zeros(64, 50)}


def test_load_of_named_tensors_gives_them_alone(store: ObjectStore) -> None:
    tensors = weights()
    save(store, open_attempt(store), 5, rows_of(tensors, 2))
    found = load(store.url, 5, names=("model.layers.*", "model.half"))
    assert list(found) == ["model.half", *(f"model.layers.{n}.w" for n in range(3))]
    assert found["model.layers.1.w"].tobytes() == tensors["model.layers.1.w"].numpy().tobytes()
    assert found["model.half"].dtype == np.float32
    assert np.array_equal(found["model.half"], tensors["model.half"].float().numpy())
    assert load(store.url).keys() == tensors.keys()
    with pytest.raises(PhalanxError, match=r"nothing\.\*.*model\.half"):
        load(store.url, names=("nothing.*",))


def test_tensors_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    manifest = save(store, open_attempt(store), 5, rows_of(weights(), 2))
    watched = FaultyStore(store)
    found = Tensors(watched, manifest.ref, Lookup(store, manifest))
    assert len(found) == 5 and "model.half" in found and "x" not in found
    assert (found.ref, found.stored("model.half").global_shape) == (CheckpointRef(1, 5), (5, 3))
    assert watched.calls == []
    assert found["model.layers.2.w"].shape == (64, 50) and len(watched.calls) == 2
    with pytest.raises(KeyError):
        found["x"]


def test_opened_with_a_damaged_tensor_gives_the_others(tmp_path: Path) -> None:
    """Case 7: named when it is asked for."""
    store = file_store(tmp_path)
    tensors = {name: random_tensor((300, 300), torch.float32, n) for n, name in enumerate(("a", "b"))}
    save(store, open_attempt(store), 5, rows_of(tensors, 1))
    path = tmp_path / "a00000001/s00000005/objects/00000000-00000000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with opened(store.url) as found:
        assert found["a"].tobytes() == tensors["a"].numpy().tobytes()
        with pytest.raises(DamagedCheckpoint, match="tensor b, chunk 0"):
            found["b"]


@pytest.mark.parametrize("names", ["model.*", b"model.*", 5, [5]])
def test_names_that_are_no_list_are_refused(tmp_path: Path, names: Any) -> None:
    store = file_store(tmp_path)
    save(store, open_attempt(store), 5, rows_of(weights(), 1))
    with opened(store.url) as found:
        for call in (lambda: load(store.url, names=names), lambda: found.named(names), lambda: found.find(names)):
            with pytest.raises(PhalanxError, match=r"expected a list of names.*write names=\["):
                call()
    assert load(store.url, names=iter(["model.half"])).keys() == {"model.half"}


def test_opened_gives_nothing_once_its_block_has_ended(tmp_path: Path) -> None:
    """Case 15: nothing keeps retention off it any more."""
    store = file_store(tmp_path)
    save(store, open_attempt(store), 5, rows_of(weights(), 1))
    with opened(store.url) as found:
        assert found["model.half"].shape == (5, 3)
    for call in (lambda: found["model.half"], lambda: found.stored("model.half"), lambda: found.find(["model.half"])):
        with pytest.raises(PhalanxError, match=r"inside `with opened\(\.\.\.\)`, which has ended"):
            call()
    assert "model.half" in found and len(found) == 5


def test_load_where_there_is_no_checkpoint_names_the_url(store: ObjectStore) -> None:
    with pytest.raises(PhalanxError, match=f"checkpoint at {store.url}: expected a job with a committed checkpoint"):
        load(store.url)


def test_load_and_removal_during_a_save_in_flight_disturb_nobody(store: ObjectStore) -> None:
    """Case 15: while the objects of a save hang in storage, older ones load and go; then the save is committed."""
    attempt = open_attempt(store)
    for step in (5, 10):
        save(store, attempt, step, rows_of(weights(step), 1))
    go_on, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert go_on.wait(60)

    slow = FaultyStore(store, [delay(on("create", "objects/", nth=0), hang)])
    pending = Writer(slow, 0, 1).save(attempt, 15, rows_of(weights(15), 1)[0])
    assert hangs.wait(60)
    assert load(store.url)["model.layers.0.w"].tobytes() == weights(10)["model.layers.0.w"].numpy().tobytes()
    report = prune(store, find_job(store.url).policy(1), dry_run=False, grace_s=0)
    assert [each.ref.step for each in report.removals if each.removed] == [5]
    go_on.set()
    commit(Lineage(store), store, draft(attempt, 15), 1, 30, expected={0: pending.wait(60)})
    assert load(store.url)["model.layers.0.w"].tobytes() == weights(15)["model.layers.0.w"].numpy().tobytes()
    assert [ref.step for ref in Lineage(store).checkpoints()] == [10, 15]


def test_removal_while_a_notebook_reads_spares_what_it_reads(store: ObjectStore) -> None:
    """Case 4, 15: until the block is left."""
    attempt = open_attempt(store)
    for step in (5, 10):
        save(store, attempt, step, rows_of(weights(step), 1))
    policy = find_job(store.url).policy(1)
    with opened(store.url, 5) as found:
        assert [each for each in prune(store, policy, dry_run=False, grace_s=0).removals if each.removed] == []
        assert found["model.layers.2.w"].tobytes() == weights(5)["model.layers.2.w"].numpy().tobytes()
    assert [each.ref.step for each in prune(store, policy, dry_run=False, grace_s=0).removals if each.removed] == [5]
