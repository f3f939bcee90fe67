"""Imports from S3 and into it: by the command, killed at operations of storage, and of sources that are not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.dying import every_death
from support.foreign_checkpoints import Foreign, assert_equal, torchtitan_state, write_dcp, write_hugging_face
from support.jobs import PREPARE, run_cli, write_corpus, write_job

from phalanx.checkpoint.importing.run import Import, Options
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import open_store
from phalanx.snapshot.load import iterate, load
from phalanx.spec import load_job

REF = CheckpointRef(1, 0)
KINDS = ["hugging-face", "torch-dcp"]


@pytest.fixture
def path(tmp_path: Path, s3_prefix: str) -> Path:
    """The file of a job whose data and storage are on S3, with a model of one layer."""
    prepared = run_cli(["data", "prepare", write_corpus(tmp_path / "text"), "--out", f"{s3_prefix}/data", *PREPARE])
    assert prepared.code == 0, prepared.err
    path = write_job(tmp_path, f"{s3_prefix}/data", more="\n[model.args]\nn_layers = 1\n")
    path.write_text(path.read_text().replace(f"{tmp_path.as_uri()}/store", f"{s3_prefix}/store"))
    return path


def source(kind: str, folder: Path, foreign: Foreign, url: str) -> str:
    """A checkpoint of another trainer, copied to `url` as a user would."""
    if kind == "torch-dcp":
        write_dcp(folder, torchtitan_state(foreign))
    else:
        write_hugging_face(folder, foreign, num_files=2)
    store = open_store(url)
    for file in folder.iterdir():
        store.create(file.name, file.read_bytes())
    return url


def job_url(path: Path) -> str:
    job = load_job(path).job
    return f"{job.storage}/projects/{job.project}/jobs/{job.name}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KINDS)
def test_command_imports_from_s3_to_s3_once(kind: str, path: Path, tmp_path: Path, s3_prefix: str) -> None:
    foreign = Foreign.of(load_job(path))
    url = source(kind, tmp_path / "theirs", foreign, f"{s3_prefix}/theirs")
    arguments = ["checkpoint", "import", url, "--rotary", "half", "--json"]
    done = run_cli([*arguments, "--job", path])
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert (report["source"], report["source_kind"], report["was_there"]) == (url, kind, False)
    assert_equal(load(job_url(path)), foreign.tensors(with_optimizer=kind == "torch-dcp"))
    again = run_cli([*arguments, "--job", job_url(path)])
    assert again.code == 0 and json.loads(again.out)["was_there"], again.err
    assert run_cli(["checkpoint", "verify", job_url(path)]).code == 0


@pytest.mark.timeout(240)
def test_import_to_s3_killed_at_any_operation_is_absent_or_whole_and_goes_on(
    path: Path, tmp_path: Path, s3_prefix: str
) -> None:
    """Case 1: killed before and after every third operation on the job's storage."""
    foreign = Foreign.of(load_job(path))
    url = source("torch-dcp", tmp_path / "theirs", foreign, f"{s3_prefix}/theirs")
    planned = Import(load_job(path), url, Options(rotary="half"))
    num_deaths = 0
    for where, store in every_death(
        lambda name: open_store(f"{s3_prefix}/{name}"), lambda dying: planned.run(target=dying), step=3
    ):
        num_deaths += 1
        planned.run(target=store)
        assert Lineage(store).checkpoints() == (REF,) and len(Lineage(store).attempts()) == 1, where
        assert_equal(dict(iterate(store, REF)), foreign.tensors())
    assert num_deaths > 10


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KINDS)
def test_source_on_s3_that_is_not_whole_is_refused_by_name(
    kind: str, path: Path, tmp_path: Path, s3_prefix: str
) -> None:
    job, half = load_job(path), Options(rotary="half")
    url = source(kind, tmp_path / "theirs", Foreign.of(job), f"{s3_prefix}/theirs")
    lost = next(info.key for info in open_store(url).list() if info.key.endswith((".safetensors", ".distcp")))
    open_store(url).delete(lost)
    with pytest.raises(PhalanxError, match=lost):
        Import(job, url, half)
    with pytest.raises(PhalanxError, match="a folder with safetensors files"):
        Import(job, f"{s3_prefix}/nothing", half)
    done = run_cli(["checkpoint", "import", "s3://no-such-bucket-of-anybody/x", "--job", path])
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1, done.err
    assert list(open_store(job_url(path)).list()) == []
