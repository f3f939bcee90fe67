"""`phalanx checkpoint verify` beside retention, and how it names what is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from support import checkpoints

from phalanx.cli.checkpoint import register
from phalanx.cli.errors import run_reporting_errors
from phalanx.lineage import CheckpointRef, leases
from phalanx.lineage.leases import Lease
from phalanx.objects import ObjectStore, open_store
from phalanx.snapshot.verify import DamagedChunks


@pytest.fixture
def job(tmp_path: Path) -> ObjectStore:
    """Checkpoints at 5 and 10."""
    store = open_store(f"file://{tmp_path}")
    attempt = checkpoints.open_attempt(store).number
    for step in (5, 10):
        checkpoints.save(store, CheckpointRef(attempt, step))
    return store


def verify(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    monkeypatch.setattr("sys.argv", ["phalanx", "checkpoint", "verify", *arguments])
    code = run_reporting_errors(app)
    return code, *capsys.readouterr()


def test_verify_of_a_checkpoint_that_is_being_removed_tells_it_and_checks_the_others(job, monkeypatch, capsys) -> None:
    """Case 4, 15: it is no damage; asked for by its step it is an error."""
    monkeypatch.setattr(leases, "PATIENCE_S", 0.0)
    mark = Lease(job, CheckpointRef(1, 5), "removal")
    mark.renew()
    code, out, _ = verify(monkeypatch, capsys, job.url, "--json")
    rows = json.loads(out)["checkpoints"]
    assert code == 0 and [(row["step"], row["removed"], row["damages"]) for row in rows] == [
        (5, True, []),
        (10, False, []),
    ]
    code, out, _ = verify(monkeypatch, capsys, job.url)
    assert code == 0 and "removed before it was read" in out and "whole" in out
    code, _, err = verify(monkeypatch, capsys, job.url, "5")
    assert code == 2 and "that retention keeps" in err
    mark.end()
    assert verify(monkeypatch, capsys, job.url, "5")[0] == 0


def test_verify_of_a_cut_and_of_a_vanished_object_names_their_tensors(job, tmp_path: Path, monkeypatch, capsys) -> None:
    """Case 7."""
    cut, gone = (tmp_path / f"a00000001/s{step:08d}/objects/00000000-00000000.safetensors" for step in (5, 10))
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    code, out, _ = verify(monkeypatch, capsys, job.url, "--json")
    damages = [row["damages"][0] for row in json.loads(out)["checkpoints"]]
    assert code == 1 and [each["tensors"] for each in damages] == [["model.w"], ["model.w"]]
    assert damages[0]["chunks"] == [{"tensor": "model.w", "offset": [0, 0], "chunks": [0]}]
    assert damages[1]["what"] == "is gone" and damages[1]["chunks"] == []


def test_damaged_chunks_are_told_as_runs() -> None:
    assert str(DamagedChunks("w", (0, 0), (0, 1, 2, 5, 7, 8))) == "w (chunk 0-2, 5, 7-8)"
    assert str(DamagedChunks("w", (4, 0), (3,))) == "w (chunk 3 of the box at [4, 0])"
