"""What `phalanx job show` says of a job, as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from phalanx.cli.job import _print_job
from phalanx.core.step_parts import Part, StepParts
from phalanx.lineage.events import JobState
from phalanx.train.states import Intent
from phalanx.train.values import JobView


def view(epochs: dict[str, float]) -> JobView:
    name = "projects/default/jobs/mixed"
    return JobView(name, JobState.RUNNING, Intent.RUN, 3, {}, step=7, num_steps=9, loss=2.0, epochs=epochs)


def test_job_show_tells_the_passes_over_each_source_of_a_mixture(capsys: pytest.CaptureFixture[str]) -> None:
    epochs = {"web": 0.251, "code": 1.5}
    _print_job(view(epochs), as_json=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epochs")]
    assert line.split(maxsplit=1)[1].strip() == "code 1.50, web 0.25"
    _print_job(view(epochs), as_json=True)
    assert json.loads(capsys.readouterr().out)["epochs"] == epochs


def test_job_show_of_one_split_has_no_line_of_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    _print_job(view({}), as_json=False)
    assert "epochs" not in capsys.readouterr().out
    _print_job(view({}), as_json=True)
    assert json.loads(capsys.readouterr().out)["epochs"] == {}


def test_job_show_tells_where_the_time_of_the_last_step_went(capsys: pytest.CaptureFixture[str]) -> None:
    parts = StepParts.of({Part.DATA: 0.001, Part.FORWARD: 0.25, Part.BACKWARD: 0.5, Part.REST: 0.249})
    _print_job(replace(view({}), step_parts=parts), as_json=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step_parts")]
    assert line.split(maxsplit=1)[1].strip() == "backward 50%, forward 25%, rest 25%"
    _print_job(replace(view({}), step_parts=parts), as_json=True)
    assert json.loads(capsys.readouterr().out)["step_parts"] == asdict(parts)
    _print_job(view({}), as_json=False)
    assert "step_parts" not in capsys.readouterr().out
