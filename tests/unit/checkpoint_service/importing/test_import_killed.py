"""An import that is killed anywhere: what is there afterwards is nothing that counts, or all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.dying import every_death
from support.foreign_checkpoints import Foreign, assert_equal, job_of, write_hugging_face

from phalanx.checkpoint.importing.run import Import, Options
from phalanx.core.errors import PhalanxError
from phalanx.lineage import Attempt, CheckpointRef, Lineage
from phalanx.objects import ObjectStore
from phalanx.objects.memory import MemoryStore
from phalanx.snapshot.load import iterate
from phalanx.spec import Job

REF = CheckpointRef(1, 0)


@pytest.mark.timeout(400)
def test_import_killed_at_any_operation_is_absent_or_whole_and_goes_on(tmp_path: Path) -> None:
    """Case 1: before the manifest the job cannot begin from nothing; the same import again finishes it.

    Killed before and after every second operation: the state after one is that before the next.
    """
    job = job_of(tmp_path, n_layers=1)
    foreign = Foreign.of(job)
    planned = Import(job, str(write_hugging_face(tmp_path / "hf", foreign)))
    expected, num_deaths = foreign.tensors(with_optimizer=False), 0
    for where, store in every_death(MemoryStore, lambda dying: planned.run(target=dying), step=2):
        lineage, num_deaths = Lineage(store), num_deaths + 1
        if not lineage.checkpoints() and lineage.read_job() is not None:
            with pytest.raises(PhalanxError, match="checkpoint to start from"):
                _open(store)
        planned.run(target=store)
        assert lineage.checkpoints() == (REF,), where
        assert len(lineage.attempts()) == 1, where
        assert_equal(dict(iterate(store, REF)), expected)
        assert _open(store).parent == REF, where
    assert num_deaths > 20


def test_import_goes_on_only_with_the_same_values(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    store = MemoryStore()
    Import(job, str(folder)).run(target=store)
    store.delete("a00000001/s00000000/manifest.json")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(PhalanxError, match="values have changed"):
        Import(job, str(folder)).run(target=store)


def test_import_again_does_nothing_and_another_import_is_refused(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    store = MemoryStore()
    first = Import(job, str(folder)).run(target=store)
    again = Import(job, str(folder)).run(target=store)
    assert (first.was_there, again.was_there) == (False, True)
    refused = r"whose import was begun with step 0, not 5'.* give the job another \[job\] name"
    with pytest.raises(PhalanxError, match=refused):
        Import(job, str(folder), Options(step=5)).run(target=store)


def test_import_into_a_job_that_began_otherwise_is_refused(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    store = MemoryStore()
    digest = "sha256:" + "0" * 64
    Lineage(store).create_job(request_id="r", spec={}, identity={}, identity_digest=digest)
    with pytest.raises(PhalanxError, match="a job that began otherwise"):
        Import(job, str(write_hugging_face(tmp_path / "hf", foreign))).run(target=store)


def _open(store: ObjectStore) -> Attempt:
    record = Lineage(store).read_job()
    assert record is not None
    return Lineage(store).open_attempt(
        code_digest=record.identity_digest, identity_digest=record.identity_digest, placement={}
    )
