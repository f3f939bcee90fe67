"""How a user's code gets from its folder to the import path, and what happens when it changes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.lineage import Lineage
from phalanx.lineage.keys import code
from phalanx.spec import Job, load_job, parse_job
from phalanx.trainer.code import code_digest, own_code
from phalanx.trainer.places import job_store
from phalanx.trainer.shipping import carry_code, enter_code, unpacked, with_code

DIGEST = f"sha256:{'0' * 64}"


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def _job(tmp_path: Path, name: str = "own", **code: Any) -> Job:
    folder = tmp_path / "project"
    if not folder.exists():
        (folder / "shipped_own").mkdir(parents=True)
        _write(folder, 1)
    return parse_job(
        {
            "job": {"name": name, "storage": (folder / "store").as_uri()},
            "model": {"class": "shipped_own:Model", "args": {}},
            "code": {"path": str(folder), **code},
            "data": {"train": "memory://nothing/train"},
            "training": {"seq_len": 8, "steps": 1, "global_batch_size": 1},
            "optimizer": {"lr": 0.1},
            "cluster": {"cache_folder": str(tmp_path / "cache")},
            "metrics": {"folder": str(folder / "metrics")},
        }
    )


def _write(folder: Path, width: int) -> None:
    (folder / "shipped_own/__init__.py").write_text("from shipped_own.sizes import width\n")
    (folder / "shipped_own/sizes.py").write_text(f"width = {width}\n")


def _open_attempt(job: Job) -> None:
    lineage = Lineage(job_store(job))
    if lineage.read_job() is None:
        lineage.create_job(request_id="r", spec={}, identity={"a": 1}, identity_digest=DIGEST, origin=None)
    lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement=job.placement(1))


def _width() -> int:
    return importlib.import_module("shipped_own").width


def test_packed_code_is_imported_from_its_own_copy_on_the_node(tmp_path: Path) -> None:
    job, told = with_code(_job(tmp_path))
    assert told == () and job.code.digest is not None and with_code(job) == (job, ())
    _write(Path(str(job.code.path)), 2)
    enter_code(job)
    assert _width() == 1
    assert Path(importlib.import_module("shipped_own").__file__).is_relative_to(tmp_path / "cache/code")
    assert own_code(job) == (job.code.digest,) and code_digest(*own_code(job)) != code_digest()


@pytest.mark.parametrize("name", ["json.py", "torch.py", "numpy/__init__.py"])
def test_module_that_ranks_would_take_for_another_is_refused(tmp_path: Path, name: str) -> None:
    job = _job(tmp_path)
    file = tmp_path / "project" / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    with pytest.raises(
        PhalanxError, match=rf"code\.path is .*{name[:5]}.*names of your own: .*; rename it, or list it"
    ):
        with_code(job)
    (tmp_path / "project/.phalanxignore").write_text(f"/{name.partition('/')[0]}\n")
    assert with_code(job)[0].code.digest is not None


def test_folder_or_inner_module_with_a_taken_name_is_packed(tmp_path: Path) -> None:
    job = _job(tmp_path)
    for name in ("json/notes.py", "shipped_own/torch.py", "test/__init__.py"):
        (tmp_path / "project" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "project" / name).touch()
    assert with_code(job)[0].code.digest is not None


def test_code_that_is_only_looked_at_has_its_digest_and_stores_nothing(tmp_path: Path) -> None:
    job = _job(tmp_path)
    looked, told = with_code(job, ships=False)
    assert told == () and not list(job_store(job).list())
    assert with_code(job)[0] == looked and list(job_store(job).list())


def test_what_the_job_writes_into_the_folder_is_no_part_of_its_code(tmp_path: Path) -> None:
    first, _ = with_code(_job(tmp_path))
    (tmp_path / "project/metrics").mkdir()
    (tmp_path / "project/metrics/log.py").touch()
    assert with_code(_job(tmp_path))[0] == first, "the archive itself lies in the store below the folder"


@pytest.mark.parametrize("on_change", ["keep", "take", "refuse"])
def test_job_that_goes_on_treats_changed_code_by_its_policy(on_change: str, tmp_path: Path) -> None:
    first, _ = with_code(_job(tmp_path))
    _open_attempt(first)
    assert with_code(_job(tmp_path, on_change=on_change))[1] == ()
    _write(tmp_path / "project", 2)
    changed = _job(tmp_path, on_change=on_change)
    if on_change == "refuse":
        with pytest.raises(PhalanxError, match=rf"code\.path.*the newest attempt ran \({first.code.digest}\)"):
            with_code(changed)
        return
    job, (told,) = with_code(changed)
    assert (job.code.digest == first.code.digest) == (on_change == "keep")
    assert "has changed since the newest attempt" in told and str(job.code.digest) in told
    enter_code(job)
    assert _width() == (1 if on_change == "keep" else 2)


def test_process_that_enters_other_code_forgets_the_first(tmp_path: Path) -> None:
    enter_code(with_code(_job(tmp_path))[0])
    assert _width() == 1
    _write(tmp_path / "project", 2)
    enter_code(with_code(_job(tmp_path))[0])
    assert _width() == 2 and len([place for place in sys.path if "cache/code" in place]) == 1


def test_process_that_enters_code_keeps_libraries_that_the_job_names(tmp_path: Path) -> None:
    job = _job(tmp_path)
    named = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"class_": "colorsys:Optimizer"})})
    assert "colorsys:Optimizer" in named.own_names.values()
    library = importlib.import_module("colorsys")
    enter_code(with_code(named)[0])
    assert sys.modules.get("colorsys") is library and _width() == 1


def test_copy_on_the_node_that_lost_a_file_is_left_alone_and_laid_out_again(tmp_path: Path) -> None:
    job, _ = with_code(_job(tmp_path))
    first = unpacked(job, str(job.code.digest))
    assert unpacked(job, str(job.code.digest)) == first
    (first / "shipped_own/sizes.py").unlink()
    (first.parent / ".unfinished").mkdir()  # of a process that was killed while it laid something out
    second = unpacked(job, str(job.code.digest))
    assert second != first and (second / "shipped_own/sizes.py").exists()
    assert unpacked(job, str(job.code.digest)) == second
    assert sorted(path.name for path in first.parent.iterdir()) == sorted([".lock", first.name, second.name])


def test_code_that_storage_has_not_or_not_whole_is_refused(tmp_path: Path) -> None:
    job, _ = with_code(_job(tmp_path))
    missing = job.model_copy(update={"code": job.code.model_copy(update={"digest": DIGEST})})
    with pytest.raises(PhalanxError, match=r"code\.digest is 'sha256:0000.*packed code at code/0000"):
        enter_code(missing)
    stored = tmp_path / "project/store/projects/default/jobs/own" / code(str(job.code.digest))
    stored.chmod(0o600)
    stored.write_bytes(stored.read_bytes()[:-512])
    with pytest.raises(PhalanxError, match="whole"):
        enter_code(job)


def test_fork_takes_the_code_of_its_origin_along(tmp_path: Path) -> None:
    origin, _ = with_code(_job(tmp_path))
    fork = _job(tmp_path, "fork", digest=origin.code.digest)
    carry_code(origin, fork)
    carry_code(origin, fork)
    enter_code(fork)
    assert _width() == 1


def test_relative_path_starts_at_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[job]\nname = "a"\nstorage = "memory://a"\n[model]\npreset = "tiny"\n[code]\npath = "."\n'
        '[data]\ntrain = "memory://a"\n[training]\nseq_len = 8\nsteps = 1\nglobal_batch_size = 1\n'
        "[optimizer]\nlr = 0.1\n"
    )
    assert Path(str(load_job(tmp_path / "job.toml").code.path)).resolve() == tmp_path.resolve()
