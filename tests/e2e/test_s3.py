"""The whole way on a real S3 server: prepare, run, lose a rank, another layout, prove, verify, export."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support.jobs import PHALANX, PREPARE, Command, run_cli, write_corpus, write_job


@pytest.mark.timeout(240)
def test_job_on_s3_survives_a_kill_and_a_relayout_and_is_proven(s3_prefix: str, tmp_path: Path) -> None:
    prepared = run_cli(["data", "prepare", write_corpus(tmp_path / "text"), "--out", f"{s3_prefix}/data", *PREPARE])
    assert prepared.code == 0, prepared.err
    path = write_job(tmp_path, f"{s3_prefix}/data", steps=8)
    path.write_text(path.read_text().replace(f"{tmp_path.as_uri()}/store", f"{s3_prefix}/store"))

    with Command([PHALANX, "run", path, "--json"]) as run:
        run.wait_for("checkpoint of step 2 committed")
        os.kill(run.ranks()[0], signal.SIGKILL)
        first = run.finish()
        run.wait_until_nothing_lives()
    assert first.code == 0 and len(json.loads(first.out)["incidents"]) == 1, first.err

    second = run_cli(["run", path, "--nproc", "1", "--set", "training.steps=10", "--json"])
    assert second.code == 0 and json.loads(second.out)["steps"] == 10, second.err
    proof = json.loads(run_cli(["data", "verify", path, "--json"]).out)
    assert proof["ok"] and proof["steps"] == 10 and proof["windows"] == 80
    assert run_cli(["checkpoint", "verify", path]).code == 0
    assert run_cli(["checkpoint", "export", path, "latest", "--out", tmp_path / "exported"]).code == 0
    assert (tmp_path / "exported" / "model.safetensors").stat().st_size > 0
