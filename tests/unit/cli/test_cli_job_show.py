"""What `phalanx job show` says of a job, as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from phalanx.cli.job import _print_job
from phalanx.core.expert_load import ExpertLoad
from phalanx.core.step_parts import Part, StepParts
from phalanx.lineage.events import JobState
from phalanx.train.states import Intent
from phalanx.train.values import EvaluationView, JobView


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


def test_job_show_tells_how_experts_were_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    load = ExpertLoad(2.5, 1.25, 0.125, 0.01)
    _print_job(replace(view({}), expert_load=load), as_json=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("expert_load")]
    said = "busiest 2.50 x mean of its layer, 1.25 in the mean of layers, 12% idle"
    assert line.split(maxsplit=1)[1].strip() == f"{said}, balance loss 0.01"
    _print_job(replace(view({}), expert_load=load), as_json=True)
    assert json.loads(capsys.readouterr().out)["expert_load"] == asdict(load)
    _print_job(view({}), as_json=False)
    assert "expert_load" not in capsys.readouterr().out


def test_job_show_tells_the_jobs_own_metrics_also_one_that_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = EvaluationView(6, 2.25, {"odd": None, "accuracy": 0.5})
    _print_job(replace(view({}), evaluation=evaluation), as_json=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation")]
    assert line.split(maxsplit=1)[1].strip() == "step 6: loss 2.2500, accuracy 0.5000, odd not finite"
    _print_job(replace(view({}), evaluation=evaluation), as_json=True)
    assert json.loads(capsys.readouterr().out)["evaluation"] == asdict(evaluation)


def test_job_show_tells_where_the_time_of_the_last_step_went(capsys: pytest.CaptureFixture[str]) -> None:
    parts = StepParts.of({Part.DATA: 0.001, Part.FORWARD: 0.25, Part.BACKWARD: 0.5, Part.REST: 0.249})
    _print_job(replace(view({}), step_parts=parts), as_json=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step_parts")]
    assert line.split(maxsplit=1)[1].strip() == "backward 50%, forward 25%, rest 25%"
    _print_job(replace(view({}), step_parts=parts), as_json=True)
    assert json.loads(capsys.readouterr().out)["step_parts"] == asdict(parts)
    _print_job(view({}), as_json=False)
    assert "step_parts" not in capsys.readouterr().out
