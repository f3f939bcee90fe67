from __future__ import annotations

import json
import os
import sys
import tomllib

import pytest
import typer
from spec_samples import SMALL

from phalanx.cli import config
from phalanx.cli.errors import run_reporting_errors
from phalanx.spec.toml import toml_text


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs `phalanx config ...` on the small job; gives (exit code, stdout, stderr)."""
    path = tmp_path / "job.toml"
    path.write_text(toml_text(SMALL))
    app = typer.Typer()
    config.register(app)
    app.command("other")(lambda: None)

    def call(command, *arguments):
        monkeypatch.setattr(sys, "argv", ["phalanx", "config", command, str(path), *arguments])
        code = run_reporting_errors(app)
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


def test_config_show_prints_the_file_with_overrides(run):
    code, out, _ = run("show", "--set", "training.steps=7")
    assert code == 0 and tomllib.loads(out)["training"] == {"seq_len": 128, "steps": 7, "global_batch_size": 16}


def test_config_show_resolved_fills_in_presets_and_defaults(run):
    code, out, _ = run("show", "--resolved", "--json")
    shown = json.loads(out)
    assert code == 0 and shown["model"]["args"]["dim"] == 128 and shown["lr_scheduler"]["total_steps"] == 40


def test_config_check_good_job_names_its_layout_and_warns(run):
    code, out, err = run("check", "--world", "4", "--set", "parallel.tp=2", "--set", "parallel.schedule=gpipe")
    assert code == 0 and "good for 4 ranks (dp_shard 2 x tp 2)" in out
    assert "warning: parallel.schedule has no effect" in err


def test_config_check_says_what_layout_is_chosen(run):
    automatic = ("check", "--world", "4", "--set", "parallel.layout=auto")
    code, out, err = run(*automatic)
    assert code == 0 and "good for 4 ranks (dp_shard 4)" in out
    assert "layout for 4 ranks: dp_shard 4, zero 3 (CPUs" in err
    code, out, _ = run(*automatic, "--json")
    found = json.loads(out)
    assert code == 0 and found["layout"]["dp_shard"] == 4 and "layout for 4 ranks" in found["chosen"]
    code, _, err = run(*automatic, "--set", "cluster.device=cuda")
    assert code == 2 and err.startswith("phalanx: cluster.gpu: ") and len(err.splitlines()) == 1


def test_config_check_bad_job_exits_2_with_one_line_a_mistake(run):
    code, out, err = run("check", "--world", "6", "--set", "parallel.tp=8", "--set", "training.stepz=3")
    assert code == 2 and out == ""
    assert {line.removeprefix("phalanx: ").split(" is ")[0] for line in err.splitlines()} == {
        "training.stepz",
        "parallel",
        "parallel.tp",
    }


def test_config_check_as_json_gives_the_problems(run):
    code, out, _ = run("check", "--json", "--set", "training.stepz=3")
    found = json.loads(out)
    assert code == 2 and found["ok"] is False
    assert found["problems"] == [
        {
            "where": "training.stepz",
            "value": 3,
            "expected": "a key that the job file knows",
            "remedy": "did you mean training.steps?",
        }
    ]
    code, out, _ = run("check", "--json", "--world", "8")
    assert code == 0 and json.loads(out)["layout"]["dp_shard"] == 8


def test_config_check_shows_what_nccl_is_told_and_what_the_environment_says_otherwise(run, monkeypatch):
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_IB_TC", "0")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    stated = ("check", "--set", "cluster.device=cuda", "--set", "cluster.network.ib_traffic_class=106")
    code, out, err = run(*stated)
    assert code == 0 and out.splitlines()[1:] == [
        "NCCL_DEBUG=WARN by the environment of this command",
        "NCCL_IB_TC=106 by cluster.network.ib_traffic_class",
    ]
    assert "warning: NCCL_IB_TC is '0' in the environment" in err
    found = json.loads(run(*stated, "--json")[1])
    assert found["network"] == [
        {"variable": "NCCL_DEBUG", "value": "WARN", "key": ""},
        {"variable": "NCCL_IB_TC", "value": "106", "key": "cluster.network.ib_traffic_class"},
    ]
    assert any("NCCL_IB_TC" in each for each in found["warnings"])
    code, out, err = run("check")
    assert code == 0 and "NCCL" not in out + err
