"""`phalanx plan` with clusters, comparisons and pictures, as its user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from phalanx.cli import plan
from phalanx.cli.errors import run_reporting_errors
from phalanx.planner.mfu import mfu_of
from phalanx.spec import load_job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PLAN = (sys.executable, "-m", "phalanx.cli", "plan")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `phalanx plan` on an example, or a file elsewhere; gives (exit code, stdout, stderr)."""
    app = typer.Typer()
    plan.register(app)
    app.command("other")(lambda: None)

    def call(name, *arguments):
        monkeypatch.setattr(
            sys,
            "argv",
            ["phalanx", "plan", str(EXAMPLES / f"{name}.toml"), *arguments],
        )
        code = run_reporting_errors(app)
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


def test_plan_says_time_failures_and_cost_of_the_jobs_own_layout(run):
    code, out, _ = run("8b-64gpu")
    said = " ".join(out.split())
    assert code == 0
    for part in ("tokens/s", "MFU", "of it: ", "failures: one in", "days of training", "GPU-hours", "$", "MWh"):
        assert part in said
    assert "best: " not in said


def test_plan_of_a_job_on_cpus_says_nothing_of_time(run):
    code, out, _ = run("demo")
    assert code == 0 and "MFU" not in out
    code, _, err = run("demo", "--compare")
    assert code == 2 and "--gpus" in err and len(err.strip().splitlines()) == 1


def test_compare_gives_a_section_that_is_the_best_layout(run, tmp_path):
    code, out, _ = run("8b-64gpu", "--compare", "--json")
    found = json.loads(out)
    assert code == 0 and found["best"]["fits"] and found["best"]["why"] == "the best"
    assert found["own"]["step"]["total_s"] >= found["best"]["step"]["total_s"]
    assert all(rival["reason"] for rival in found["rivals"]) and len(found["rivals"]) > 5
    tables = tomllib.loads(found["parallel"])
    job = tmp_path / "job.toml"
    text = (EXAMPLES / "8b-64gpu.toml").read_text()
    before, _, after = text.partition("[parallel]")
    job.write_text(before + found["parallel"] + "[compile]" + after.partition("[compile]")[2])
    again = load_job(job, (), 64, check_world=True)
    assert again.parallel.tp == tables["parallel"]["tp"]
    code, out, _ = run(str(job.with_suffix("")), "--json")
    own = json.loads(out)["own"]
    assert code == 0 and own["step"]["total_s"] == found["best"]["step"]["total_s"]
    assert own["memory_bytes"] == found["best"]["memory_bytes"]


def test_compare_for_people_lists_rivals_and_the_section(run):
    code, out, _ = run("8b-64gpu", "--compare")
    assert code == 0 and "best: " in out and "why it loses" in out and "% slower" in out
    assert out.rstrip().endswith('mode = "none"') and "[parallel]" in out


def test_other_gpus_that_the_layout_does_not_fit_are_searched(run):
    code, out, _ = run("8b-64gpu", "--gpus", "a100:8", "--nodes", "32")
    assert code == 0 and "the job's own layout is none for these GPUs" in out and "best: " in out
    assert "of 80.0 GiB" in out


def test_other_gpus_that_the_layout_fits_keep_it(run):
    code, out, _ = run("8b-64gpu", "--gpus", "H200:8", "--json")
    found = json.loads(out)
    assert code == 0 and "best" not in found and found["layout"]["dp_shard"] == 64 and found["fits"]


def test_why_tells_how_a_layout_compares_with_the_best(run):
    code, out, _ = run("8b-64gpu", "--why", "tp=8,pp=8,zero=1,recompute=none")
    assert code == 0 and "asked: tp 8, pp 8, dp 1" in out and "beside the best: " in out
    code, out, _ = run("8b-64gpu", "--why", "zero=1,recompute=none")
    assert code == 0 and "beside the best: does not fit: " in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--why", "pipeline=8"), "KEY=VALUE with a key of pp, tp"),
        (("--why", "tp"), "give it one value, as tp=..."),
        (("--why", ""), "KEY=VALUE"),
        (("--why", "tp=8,tp=4"), "once at most"),
        (("--why", "dp=32,dp_shard=32"), "once at most"),
        (("--why", "TP=8"), "did you mean tp?"),
        (("--why", "pp=2,zero=2"), "1 or 3 with pp > 1"),
        (("--why", "schdule=zbv"), "did you mean schedule?"),
        (("--gpus", "X200:8"), "one of A100-40"),
        (("--gpus", "H100:x"), "such as H100:8"),
        (("--prices", "/nowhere/prices.toml"), "a readable TOML or JSON price file"),
        (("--svg", "/nowhere/step.svg"), "a file that can be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, arguments, said):
    code, _, err = run("8b-64gpu", *arguments)
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1


def test_svg_over_the_job_file_is_refused_and_the_file_stays(tmp_path):
    job = tmp_path / "job.toml"
    job.write_bytes((EXAMPLES / "70b-512gpu.toml").read_bytes())
    (tmp_path / "link.toml").symlink_to(job)
    for svg in (job, tmp_path / "link.toml"):
        command = [*PLAN, str(job), "--svg", str(svg)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert "expected another file than the job's" in done.stderr
    assert job.read_bytes() == (EXAMPLES / "70b-512gpu.toml").read_bytes()


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_standard_output_that_takes_nothing_is_one_line(options):
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        command = [*PLAN, str(EXAMPLES / "8b-64gpu.toml"), *options]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr == "phalanx: standard output: No space left on device\n"


@pytest.mark.parametrize(("name", "text"), [("p.json", "[" * 200_000), ("p.toml", "a = " + "[" * 5_000)])
def test_price_file_that_is_nested_without_end_is_one_line(run, tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    code, _, err = run("70b-512gpu", "--prices", str(path))
    assert code == 2 and "expected a readable TOML or JSON price file" in err and err.count("\n") == 1


def test_svg_and_timeline_draw_the_shown_layout(run, tmp_path):
    path = tmp_path / "step.svg"
    code, out, _ = run("70b-512gpu", "--svg", str(path), "--timeline")
    assert (
        code == 0 and path.read_text().startswith("<svg") and "interleaved_1f1b: 4 pipeline ranks" in path.read_text()
    )
    assert "0-9 forward" in out


def test_prices_of_ones_own_change_the_dollars(run, tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text('[gpu.H100]\nusd_per_hour = [1, 1]\nwatts = 700\nas_of = "2026"\norigin = "ours"\n')
    _, out, _ = run("8b-64gpu", "--json")
    _, cheap, _ = run("8b-64gpu", "--prices", str(path), "--json")
    usual, ours = (json.loads(each)["own"]["forecast"]["cost"] for each in (out, cheap))
    assert ours["usd"]["middle"] == pytest.approx(ours["gpu_hours"]) and ours["gpu_hours"] == usual["gpu_hours"]


def test_plan_says_which_layout_auto_chooses_and_it_is_the_best(run, tmp_path):
    job = tmp_path / "job.toml"
    text = (EXAMPLES / "1b-8gpu.toml").read_text()
    before, _, after = text.partition("[parallel]\n")
    job.write_text(f'{before}[parallel]\nlayout = "auto"\n[compile]\n{after.partition("[compile]")[2]}')
    code, out, _ = run(tmp_path / "job", "--compare", "--json")
    found = json.loads(out)
    assert code == 0 and found["chosen"].startswith("layout for 8 ranks: ")
    assert (found["own"]["layout"], found["own"]["run"]) == (found["best"]["layout"], found["best"]["run"])
    code, out, _ = run(tmp_path / "job", "--why", "tp=2")
    assert code == 0 and out.startswith(found["chosen"]) and "asked: tp 2" in out


@pytest.mark.parametrize(
    ("example", "setting", "said"),
    [
        ("405b-4096gpu", "checkpoint.interval=99999999", "never finishes"),
        ("405b-4096gpu", "checkpoint.interval=930000", "never finishes"),
        ("8b-64gpu", "training.seq_len=2147483647", "never finishes"),
        ("8b-64gpu", "model.args.dim=16777216", "never finishes"),
        ("8b-64gpu", "model.args.n_layers=1048576", "days of training"),
        ("405b-4096gpu", "parallel.local_batch_size=16777216", "days of training"),
    ],
)
def test_extreme_sizes_have_figures_that_can_be_read(run, example, setting, said):
    code, out, err = run(example, "--set", setting)
    assert code in (0, 2) and len(err.strip().splitlines()) == (code == 2)
    assert code == 2 or said in out
    assert re.search(r"[0-9,]{26,}", out) is None
    code, out, _ = run(example, "--set", setting, "--json")
    assert code == 2 or json.loads(out, parse_constant=pytest.fail)["own"]["forecast"]["ettr"] >= 0


def test_planned_mfu_is_that_of_the_runs_metrics(run):
    _, out, _ = run("1b-8gpu", "--json")
    own = json.loads(out)["own"]["forecast"]
    assert own["mfu"] == pytest.approx(mfu_of(load_job(EXAMPLES / "1b-8gpu.toml"))(own["tokens_per_s"]))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zbv", "interleaved_1f1b"])
def test_why_takes_nothing_from_the_jobs_own_layout(run, schedule):
    asked = ("--why", f"tp=8,pp=4,schedule={schedule},zero=1", "--json")
    _, out, _ = run("405b-4096gpu", *asked)
    found = json.loads(out)["why"]
    assert found["run"]["stages_per_rank"] == (1 if schedule in ("1f1b", "gpipe") else 2)
    code, out, _ = run(
        "8b-64gpu",
        "--set",
        "parallel.pp=4",
        "--set",
        "parallel.dp_shard=16",
        "--set",
        "parallel.stage_split=9,9,9,5",
        "--why",
        "pp=2",
        "--json",
    )
    assert code == 0 and json.loads(out)["why"]["run"]["stage_split"] == "cost"


def test_a_memory_of_ones_own_is_named_where_it_keeps_the_planner_from_timing(run):
    code, _, err = run("8b-64gpu", "--gpus", "H100:8", "--set", "cluster.gpu_memory_gib=24", "--compare")
    assert code == 2 and "cluster.gpu_memory_gib is 24" in err and "remove it" in err


def test_gpus_that_hold_the_mesh_but_not_the_memory_get_the_best_layout_or_one_line(run):
    smaller = (
        "8b-64gpu",
        "--gpus",
        "A100-40:8",
        "--set",
        "parallel.zero=1",
        "--set",
        "activation_checkpoint.mode=none",
    )
    code, out, _ = run(*smaller)
    own, best = out.split("best: ", 1)
    assert code == 0 and "does not fit: at most" in own and "days of training" not in own and "days of training" in best
    _, out, _ = run(*smaller, "--json")
    found = json.loads(out)
    assert found["fits"] is found["own"]["fits"] is False and found["best"]["fits"]
    code, out, err = run("405b-4096gpu", "--gpus", "H100:8", "--nodes", "1")
    assert code == 2 and not out and "GiB" in err and len(err.strip().splitlines()) == 1


def test_one_rule_says_what_fits(run):
    close = ("8b-64gpu", "--set", "training.seq_len=9984", "--set", "activation_checkpoint.mode=none")
    _, out, _ = run(*close, "--json")
    found = json.loads(out)
    largest = max(rank["total_bytes"] for rank in found["memory"])
    assert found["usable_bytes"] < largest < found["gpu_bytes"], "between the two limits"
    assert found["fits"] is found["own"]["fits"] is False
    _, out, _ = run(*close)
    assert "does not fit: at most" in out and "may fill 95%" in out


def test_sizes_of_the_model_do_not_go_with_a_refused_layout(run):
    elsewhere = ("8b-64gpu", "--gpus", "a100:8", "--nodes", "32")
    _, out, _ = run(*elsewhere, "--json")
    found = json.loads(out)
    assert found["refused"] and found["world_size"] == 256 and found["parameters"]["total"] == 8_030_261_248
    assert found["layout"] is None and found["memory"] == [] and found["fits"] is False and found["gpu_bytes"]
    _, out, _ = run(*elsewhere)
    assert "8,030,261,248" in out


def test_why_says_what_the_best_is(run):
    _, out, _ = run("8b-64gpu", "--why", "tp=8,pp=8,zero=1,recompute=none")
    assert "the best is " in out and " a step" in out.split("the best is ")[1].splitlines()[0]


def test_a_step_of_fewer_windows_than_places_is_told(run):
    _, out, _ = run("405b-4096gpu")
    assert "idle: " not in out and "local_batch_size is" not in out
    _, out, _ = run("405b-4096gpu", "--set", "training.global_batch_size=3")
    assert "idle: 61 of 64 data-parallel replicas have no window of a step's 3" in out
    _, out, _ = run("405b-4096gpu", "--set", "parallel.local_batch_size=16777216")
    assert "local_batch_size is 16,777,216: a replica has at most 32 of the step's 2,048 windows" in out


@pytest.mark.parametrize("example", ["8b-64gpu", "demo"])
@pytest.mark.parametrize("text", [None, "wat = 1\n", "[gpu.H100]\nwatts = -1\n"])
def test_bad_price_file_is_told_before_anything_is_printed(run, tmp_path, example, text):
    path = tmp_path / "prices.toml"
    if text is not None:
        path.write_text(text)
    code, out, err = run(example, "--prices", str(path))
    assert (code, out) == (2, "") and str(path) in err and err.count("\n") == 1


def test_search_that_finds_nothing_prints_nothing_but_its_line(run):
    code, out, err = run("405b-4096gpu", "--gpus", "A100-40:8", "--nodes", "1")
    assert (code, out) == (2, "") and err.count("\n") == 1


@pytest.mark.parametrize("gpus", ["FOO:8", "", ":8", "V100:8"])
def test_unknown_kind_names_the_option_that_gave_it(run, gpus):
    code, out, err = run("8b-64gpu", "--gpus", gpus)
    assert (
        (code, out) == (2, "") and "--gpus is" in err and "write KIND or KIND:NUMBER" in err and "cluster." not in err
    )


@pytest.mark.parametrize("gpus", ["H100:", "H100:0", "H100:-8", "H100:8.5"])
def test_number_of_gpus_is_one_where_a_colon_announces_it(run, gpus):
    code, _, err = run("8b-64gpu", "--gpus", gpus)
    assert code == 2 and f"--gpus is '{gpus}'" in err


def test_more_ranks_than_the_stated_gpus_are_refused(run):
    code, out, err = run("8b-64gpu", "--world", "64", "--gpus", "H100:8", "--nodes", "4")
    assert (code, out) == (2, "")
    assert "--world is 64: expected at most 32 ranks on 4 nodes of 8 GPUs" in err and "--nodes 8" in err
    assert run("8b-64gpu", "--world", "64", "--gpus", "H100:8", "--nodes", "8")[0] == 0
