from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer

from phalanx.cli import plan
from phalanx.cli.errors import run_reporting_errors

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
NO_RECOMPUTE = "activation_checkpoint.mode=none"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `phalanx plan` on an example; gives (exit code, stdout, stderr)."""
    app = typer.Typer()
    plan.register(app)
    app.command("other")(lambda: None)

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", ["phalanx", "plan", str(EXAMPLES / f"{name}.toml"), *arguments])
        code = run_reporting_errors(app)
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


@pytest.mark.parametrize("path", [path.stem for path in EXAMPLES.glob("*gpu.toml")])
def test_example_for_gpus_fits_them_and_uses_them(run, path):
    code, out, _ = run(path, "--json")
    found = json.loads(out)
    assert code == 0 and found["fits"] is True
    largest = max(rank["total_bytes"] for rank in found["memory"])
    assert 0.1 < largest / found["gpu_bytes"] < 0.9
    assert len(found["memory"]) == found["layout"]["pp"]


def test_plan_shows_counts_memory_and_verdict(run):
    code, out, _ = run("8b-64gpu")
    assert code == 0 and "8,030,261,248" in out and "fits: at most" in out and "H100-80" in out
    code, out, _ = run("8b-64gpu", "--set", "parallel.zero=1", "--set", "cluster.gpu=A100-40")
    assert code == 0 and "does not fit" in out


def test_plan_with_offload_fits_where_the_states_do_not_and_shows_the_host(run):
    small = ("8b-64gpu", "--set", "cluster.nodes=1", "--set", "cluster.nproc=1", "--set", "parallel.dp_shard=1")
    code, out, _ = run(*small)
    assert code == 0 and "does not fit" in out and "host ┃" not in out
    code, out, _ = run(*small, "--set", "parallel.cpu_offload=true")
    assert code == 0 and "fits: at most" in out and "┃   host ┃" in out
    code, out, _ = run("demo", "--set", "parallel.cpu_offload=true", "--json")
    assert code == 0 and all(rank["host_bytes"] == 0 for rank in json.loads(out)["memory"]), "a CPU has one memory"


def test_plan_of_the_demo_counts_its_four_micro_batches(run):
    code, out, _ = run("demo", "--json")
    found = json.loads(out)
    assert code == 0 and found["micro_batches"] == 4 and found["fits"] is None
    assert 1e6 < found["parameters"]["total"] < 3e6
    assert all(rank["runtime_bytes"] == 0 for rank in found["memory"])


def test_plan_for_another_world_or_gpu_says_what_is_wrong(run):
    code, _, err = run("demo", "--world", "6")
    assert code == 2 and "not to 8" in err
    code, _, err = run("8b-64gpu", "--set", "cluster.gpu=H100-81")
    assert code == 2 and "did you mean H100-80?" in err
    code, _, err = run("8b-64gpu", "--set", "cluster.gpu=X", "--set", "cluster.gpu_memory_gib=500", "--json")
    assert code == 0


def test_plan_of_a_class_of_the_users_says_why_not(run, tmp_path):
    text = (EXAMPLES / "small-cpu.toml").read_text().replace("[model.args]", '[model]\nclass = "a.b:C"\n[model.args]')
    path = tmp_path / "own.toml"
    path.write_text(text)
    code, _, err = run(str(path.with_suffix("")))
    assert code == 2 and "model.class" in err


def test_plan_of_a_pipeline_says_the_layers_of_its_stages_and_by_which_rule(run):
    pipeline = ("8b-64gpu", *(f"--set={each}" for each in ("parallel.pp=4", "parallel.dp_shard=16", NO_RECOMPUTE)))
    code, out, _ = run(*pipeline)
    assert code == 0 and "stages of 8, 9, 9, 6 layers (cost)" in out
    code, out, _ = run(*pipeline, "--set", "parallel.stage_split=even")
    assert code == 0 and "stages of 8, 8, 8, 8 layers (even)" in out
    code, out, _ = run(*pipeline, "--set", "parallel.stage_split=9,9,9,5", "--json")
    assert code == 0
    assert [rank["position"]["layers_by_stage"] for rank in json.loads(out)["memory"]] == [[9], [9], [9], [5]]
    code, out, _ = run(*pipeline, "--set", "activation_checkpoint.mode=full")
    assert code == 0 and "stages of 8, 9, 8, 7 layers (cost)" in out, "the head is never computed again"
