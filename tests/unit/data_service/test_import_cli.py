"""`phalanx data import` on the command line: what it prints, exit codes, parts with `data merge`, `data verify`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from import_kit import DIGEST, EOS, rows_of
from typer.testing import CliRunner, Result

from phalanx.cli.data import register
from phalanx.core.errors import PhalanxError

ROWS = rows_of(100)
TOLD = ("--tokenizer-digest", DIGEST, "--vocab-size", "50000", "--eos-id", str(EOS))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.concatenate(ROWS).astype(np.uint16).tofile(tmp_path / "train.bin")
    return tmp_path / "train.bin"


def run(*arguments: object) -> Result:
    """Runs `phalanx data ...` in this process; exceptions come through."""
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    return CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)


def test_data_import_prints_what_came_out_and_verify_finds_it_whole(source: Path, tmp_path: Path) -> None:
    out = f"file://{tmp_path}/out"
    result = run("import", source, "--out", out, "--dtype", "uint16", *TOLD, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["train"]["num_documents"] == 100
    assert report["train"]["num_tokens"] == sum(map(len, ROWS))
    assert report["counts"]["documents_without_eos"] == 0
    checked = run("verify", out, "--json")
    assert checked.exit_code == 0 and json.loads(checked.stdout)["ok"]
    shown = run("show", out, "--json")
    assert json.loads(shown.stdout)["splits"][0]["recipe"]["source_format"] == "raw"


def test_data_import_in_parts_is_merged_by_data_merge(source: Path, tmp_path: Path) -> None:
    out = f"file://{tmp_path}/out"
    result = run("import", source, "--out", out, "--dtype", "uint16", *TOLD, "--part", "2/2")
    assert result.exit_code == 0 and "data merge" in result.stdout
    with pytest.raises(PhalanxError, match="1 are missing"):
        run("merge", "--out", out)
    run("import", source, "--out", out, "--dtype", "uint16", *TOLD, "--part", "1/2", "--workers", 1)
    merged = run("merge", "--out", out, "--json")
    assert json.loads(merged.stdout)["train"]["num_documents"] == 100


def test_data_import_that_is_refused_ends_with_one_line_and_exit_code_2(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "phalanx.cli", "data", "import", source, "--out", f"file://{tmp_path}/out", *TOLD]
    done = subprocess.run([*command, "--dtype", "uint32"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert str(source) in line and "token 0" in line and "from 0 to 49999" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "wrong", [("--format", "tfrecord"), ("--boundaries", "lines"), ("--workers", "0"), ("--part", "3/2")]
)
def test_data_import_names_a_wrong_option(source: Path, tmp_path: Path, wrong: tuple[str, str]) -> None:
    with pytest.raises(PhalanxError, match=f"^{wrong[0]}"):
        run("import", source, "--out", f"file://{tmp_path}/out", "--dtype", "uint16", *TOLD, *wrong)
    assert not (tmp_path / "out").exists()
