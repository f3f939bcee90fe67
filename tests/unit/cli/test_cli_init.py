"""`phalanx init` makes a whole project or none, and never writes into a folder of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.init import init, write_template
from phalanx.core.errors import PhalanxError
from phalanx.spec import load_job
from phalanx.trainer.packing import IGNORE_FILE

FILES = {
    IGNORE_FILE,
    "README.md",
    "job.toml",
    "my_model/__init__.py",
    "my_model/model.py",
    "my_model/objective.py",
    "tests/test_my_model.py",
}


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_there", [False, True])
def test_init_makes_a_project_whose_job_file_packs_its_own_folder(is_there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "own"
    if is_there:
        folder.mkdir(parents=True)
    write_template("custom-model", folder)
    assert _files(tmp_path / "deep") == {f"own/{name}" for name in FILES}, "nothing is left beside it"
    job = load_job(folder / "job.toml", check_world=True)
    assert job.code.path is not None and Path(job.code.path).resolve() == folder.resolve()
    assert set(job.own_names) == {"model.class", "loss.fn", "metrics.fn.accuracy"}


def test_init_into_a_folder_that_holds_something_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/thesis.tex").write_text("years of work")
    with pytest.raises(PhalanxError, match=r"DIR is .*expected a new or an empty folder"):
        write_template("custom-model", tmp_path / "own")
    with pytest.raises(PhalanxError, match=r"DIR is .*expected a new or an empty folder"):
        write_template("custom-model", tmp_path / "own/thesis.tex")
    assert _files(tmp_path) == {"own/thesis.tex"}


def test_init_of_a_template_that_does_not_exist_names_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match="--template is 'mine': expected one of custom-model"):
        init(tmp_path / "own", "mine")
    assert not _files(tmp_path)
