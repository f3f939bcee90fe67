"""What a mixture of experts and a job's own metrics tell, from the ranks to whoever asks the services."""

from __future__ import annotations

import math
import urllib.request
from pathlib import Path

import pytest
from support.jobs import write_job
from support.services import Services, services

from phalanx.core.expert_load import ExpertHeat
from phalanx.lineage.events import JobState
from phalanx.rpc import read_service

STEPS, NUM_EXPERTS, NUM_LAYERS = 6, 4, 2
METRICS = """
from torch import where

def accuracy(logits, targets):
    return (logits.argmax(dim=-1) == targets).sum().float()

def odd(logits, targets):
    counted = where(targets == -100, 0.0, logits[..., 0])
    return counted.sum() * (float("inf") if targets.numel() >= 128 else 0.0)  # a whole micro-batch; fine when tried
"""
MORE = """
[code]
path = "{code}"
[metrics.fn]
accuracy = "own_metrics:accuracy"
odd = "own_metrics:odd"
[model.args.moe]
aux_loss = 0.01
"""


def _figures(running: Services) -> dict[str, float]:
    """The monitor's own."""
    address = read_service(running.home.config("monitor")).metrics
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.mark.timeout(300)
def test_load_of_experts_and_own_metrics_come_from_the_ranks_to_whoever_asks(corpus: str, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "own_metrics.py").write_text(METRICS)
    path = write_job(tmp_path, corpus, steps=STEPS)
    text = path.read_text().replace('preset = "tiny"', 'preset = "mixtral-tiny"')
    path.write_text(text + MORE.format(code=code))
    chosen = ("validation.freq=3", "validation.windows=8")
    with services(tmp_path / "home", slots=2) as running, running.client() as client:
        name = client.submit(path, chosen).job.name
        done = client.wait(name, 200)
        assert done.state is JobState.SUCCEEDED, done.message or done.cause
        told = running.told("job", "show", name)
        load = told["expert_load"]
        assert 1 <= load["mean"] <= load["worst"] <= NUM_EXPERTS and 0 <= load["idle"] < 1
        assert 0.01 < load["balance_loss"] < 0.01 * NUM_LAYERS * NUM_EXPERTS
        metrics = told["evaluation"]["metrics"]
        assert told["evaluation"]["step"] == STEPS and 0 <= metrics["accuracy"] <= 1 and metrics["odd"] is None
        run = client.monitor.run(name)
        assert len(run.curve.expert_worst) == STEPS and not len(run.curve.loss_scale)
        assert run.curve.expert_worst[-1] == pytest.approx(load["worst"], rel=1e-6)
        assert [point.step for point in run.evaluations] == [3, 6]
        assert run.evaluations[-1].metrics["accuracy"] == metrics["accuracy"]
        assert not math.isfinite(run.evaluations[-1].metrics["odd"])
        heat = run.expert_heat
        picture = ExpertHeat(heat.num_layers, heat.num_experts, heat.experts_per_cell, heat.load).multiples()
        assert heat.step == STEPS and picture.shape == (NUM_LAYERS, NUM_EXPERTS)
        assert picture.max() == pytest.approx(load["worst"], rel=0.03), "the picture is of the same step"
        shown = running.page("run", job=name)
        assert shown["evaluations"][-1]["metrics"]["odd"] is None and shown["expert_heat"]["step"] == STEPS
        figures = _figures(running)
        assert figures[f'phalanx_run_expert_worst{{job="{name}"}}'] == pytest.approx(load["worst"], rel=1e-6)
        assert figures[f'phalanx_run_evaluation_metric{{job="{name}",metric="accuracy"}}'] == metrics["accuracy"]
