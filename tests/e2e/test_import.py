"""A job that begins with what another program trained: imported through the command line, then run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from support.foreign_checkpoints import Foreign, torchtitan_state, write_dcp
from support.jobs import assert_proven, job_folder, lineage_of, newest_tensors, run_cli, run_here, write_job

from phalanx.gang import ForkServer
from phalanx.lineage import CheckpointRef
from phalanx.spec import load_job


class Hostile:
    """Pickled, it is a call of os.system."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.timeout(300)
def test_a_run_goes_on_from_an_imported_checkpoint(tmp_path: Path, corpus: str, server: ForkServer) -> None:
    path = write_job(tmp_path, corpus, steps=2, nproc=1)
    foreign = Foreign.of(load_job(path))
    folder = write_dcp(tmp_path / "dcp", torchtitan_state(foreign, step=3))
    finished = run_cli(["checkpoint", "import", folder, "--job", path, "--rotary", "half", "--json"])
    assert finished.code == 0, finished.err
    np.testing.assert_array_equal(
        newest_tensors(path)["optim.norm.weight.exp_avg"], foreign.exp_avg["norm.weight"].numpy()
    )
    run = run_here(path, server)
    assert run.outcome is not None and run.outcome.state == "ok", run.outcome
    lineage = lineage_of(path)
    assert lineage.checkpoints() == (CheckpointRef(1, 0), CheckpointRef(2, 2))
    assert lineage.manifest(CheckpointRef(2, 2)).schedule["num_updates"] == 5
    assert_proven(path, 2)


@pytest.mark.timeout(120)
def test_importing_a_hostile_pickle_exits_2_with_one_line(tmp_path: Path, corpus: str) -> None:
    """Case 6."""
    path, folder = write_job(tmp_path, corpus), tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    finished = run_cli(["checkpoint", "import", folder, "--job", path, "--rotary", "half"])
    assert finished.code == 2 and len(finished.err.strip().splitlines()) == 1, finished.err
    assert "names posix.system" in finished.err and "nothing of it was run" in finished.err
    assert not (tmp_path / "ran").exists() and not job_folder(path).exists()
