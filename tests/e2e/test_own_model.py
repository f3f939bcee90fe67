"""A package outside the tree with its own model, loss and metric: made by `phalanx init`, packed, trained, killed,
restored in other layouts, edited meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import Run, assert_proven, lineage_of, losses_of, run_cli, run_here, wait_until
from support.services import Services, services, wait_for_step

from phalanx.client import Client
from phalanx.gang import Event, ForkServer
from phalanx.snapshot import load
from phalanx.spec import load_job

BOUND = 1e-5
TP2_DP2 = ("cluster.nproc=4", "parallel.tp=2")
PP2 = ("cluster.nproc=2", "parallel.pp=2", "parallel.zero=1")
KILLED_AT, KILLED_RANK = 3, 2


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """What `phalanx init` makes; this process forgets afterwards what it imported of it."""
    path, modules = list(sys.path), set(sys.modules)
    finished = run_cli(["init", tmp_path / "project", "--template", "custom-model"])
    assert finished.code == 0, finished.err
    yield tmp_path / "project"
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if name.partition(".")[0] == "my_model":
            del sys.modules[name]


def _overrides(tmp_path: Path, corpus: str, name: str) -> tuple[str, ...]:
    return (
        f"job.name={name}",
        f"job.storage={(tmp_path / 'store').as_uri()}",
        f"metrics.folder={tmp_path / 'metrics'}",
        f"cluster.cache_folder={tmp_path / 'cache'}",
        f"data.train={corpus}/train",
        f"data.held_out={corpus}/held_out",
        "training.seq_len=32",
        "training.global_batch_size=8",
        'training.mixed_precision_param="float32"',
        "lr_scheduler.total_steps=20",
        "parallel.local_batch_size=2",
        "checkpoint.interval=2",
        "validation.freq=4",
        "validation.windows=8",
    )


def test_started_project_passes_its_own_tests(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout


def test_own_model_killed_edited_and_restored_in_other_layouts_is_one_process(
    corpus: str, server: ForkServer, project: Path, tmp_path: Path
) -> None:
    path = project / "job.toml"
    one, many = (_overrides(tmp_path, corpus, name) for name in ("one", "many"))
    whole = run_here(path, server, *one, "training.steps=8", "cluster.nproc=1", "checkpoint.interval=20")
    assert whole.outcome is not None and whole.outcome.ok, whole.outcome

    def kill(run: Run, event: Event) -> None:
        if event.kind == "progress" and event.fields["step"] == KILLED_AT and run.tally.attempts == [1]:
            assert run.gang is not None
            os.kill(run.gang.pids[KILLED_RANK], signal.SIGKILL)

    run = run_here(path, server, *many, *TP2_DP2, "training.steps=6", on_event=kill)
    assert run.outcome is not None and run.outcome.ok and run.tally.attempts == [1, 2], run.tally
    model = project / "my_model/model.py"
    model.write_text(model.read_text().replace("F.relu(", "torch.tanh("))
    run = run_here(path, server, *many, *PP2, "training.steps=8")
    assert run.outcome is not None and run.outcome.ok, run.outcome

    losses, expected = losses_of(path, *many), losses_of(path, *one)
    assert sorted(losses) == sorted(expected) == list(range(1, 9))
    assert max(abs(losses[step] / expected[step] - 1) for step in losses) <= BOUND
    assert_proven(path, 8, *many)

    lineage = lineage_of(path, *many)
    digests = {json.dumps(attempt.placement["code"]) for attempt in lineage.attempts()}
    assert len(lineage.attempts()) == 3 and len(digests) == 1, "the code that it began with goes on"
    for told in (whole, run):
        shown = [event.fields for event in told.of("evaluation")]
        assert [each["step"] for each in shown][-1] == 8 and 0 <= shown[-1]["metrics"]["accuracy"] <= 1
    newest = lineage.manifest(lineage.checkpoints()[-1])
    assert set(newest.metrics) == {"validation_loss", "accuracy"}

    job = load_job(path, many)
    tensors = load(f"{job.job.storage}/projects/default/jobs/many")
    names = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    assert names >= {"embed.weight", "layers.3.query.weight", "layers.0.norm.bias", "head.weight"} and len(names) == 44


@pytest.mark.timeout(300)
def test_submitted_job_keeps_its_code_until_a_resume_gives_it_another(
    corpus: str, project: Path, tmp_path: Path
) -> None:
    settings = [part for each in _overrides(tmp_path, corpus, "own") for part in ("--set", each)]
    with services(tmp_path / "home", slots=1) as running, running.client() as client:
        running.told(
            "job",
            "submit",
            project / "job.toml",
            *settings,
            "--set",
            "training.steps=1_000_000",
            "--set",
            "cluster.nproc=1",
        )
        wait_for_step(client, "own", 2)
        _suspend(running, client)
        model = project / "my_model/model.py"
        model.write_text(model.read_text().replace("F.relu(", "torch.tanh("))
        running.told("job", "resume", "own")
        wait_for_step(client, "own", client.job("own").step + 1)
        _suspend(running, client)
        refused = running.cli("job", "resume", "own", "--code", project, "--set", "code.on_change=keep", code=2)
        assert "expected a folder or keys of [code], not both" in refused.err and refused.err.count("\n") == 1
        refused = running.cli("job", "resume", "own", "--code", tmp_path / "nowhere", code=2)
        assert "nowhere" in refused.err and refused.err.count("\n") == 1
        told = running.cli("job", "resume", "own", "--code", project).err
        assert "the job goes on with the new code" in told
        wait_for_step(client, "own", client.job("own").step + 1)
        _suspend(running, client)
        digest = client.job("own").spec["code"]["digest"]
        running.told("job", "resume", "own")
        wait_for_step(client, "own", client.job("own").step + 1)
        running.told("job", "stop", "own")
        running.told("job", "wait", "own", code=1)
    attempts = lineage_of(project / "job.toml", *_overrides(tmp_path, corpus, "own")).attempts()
    first, kept, taken, again = (attempt.placement["code"]["digest"] for attempt in attempts)
    assert first == kept != taken == again == digest


def _suspend(running: Services, client: Client) -> None:
    running.told("job", "suspend", "own")
    wait_until(lambda: client.job("own").state == "suspended", 30, "not suspended")


def test_own_model_without_the_method_that_the_layout_needs_is_refused_in_one_line(
    corpus: str, project: Path, tmp_path: Path
) -> None:
    model = project / "my_model/model.py"
    model.write_text(model.read_text().replace("def parallel_plan", "def no_plan"))
    chosen = [word for each in (*_overrides(tmp_path, corpus, "refused"), *TP2_DP2) for word in ("--set", each)]
    finished = run_cli(["run", project / "job.toml", *chosen])
    assert finished.code == 2
    assert finished.err.splitlines()[-1] == (
        "phalanx: parallel.tp is 2: expected 1, because MyModel has no parallel_plan(); add the method (see "
        "phalanx.models.protocol) or set tp = 1"
    )
