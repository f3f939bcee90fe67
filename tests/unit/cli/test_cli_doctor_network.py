"""`phalanx doctor --nproc`: what it asks for, what it refuses, what it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer

from phalanx.cli import doctor
from phalanx.cli.doctor_network import Asked, plan_of, size_of
from phalanx.cli.errors import run_reporting_errors
from phalanx.core.errors import PhalanxError
from phalanx.spec import Layout

JOB = """
[job]
name = "asked"
storage = "memory://asked"

[model]
preset = "demo"

[data]
train = "memory://corpus"

[training]
seq_len = 64
steps = 2
global_batch_size = 8

[optimizer]
lr = 1e-3

[parallel]
tp = 2

[cluster]
nproc = 4
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    app = typer.Typer()
    doctor.register(app)
    app.command("other")(lambda: None)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["phalanx", "doctor", *arguments])
        code = run_reporting_errors(app)
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--nproc", "1"], "nproc"),
        (["--nproc", "two"], "nproc"),
        (["--nproc", "257"], "--nproc is 257: expected from 2 to 256 ranks"),
        (["--nproc", "4", "--parallel", "tp=3"], "--parallel is 'tp=3': expected sizes that multiply to the 4 ranks"),
        (["--nproc", "4", "--parallel", "tp=2,tp=2"], "expected axes with their sizes as tp=2,pp=2"),
        (["--nproc", "4", "--parallel", "ep=2"], "expected axes with their sizes"),
        (["--nproc", "4", "--parallel", "tp=0"], "expected axes with their sizes"),
        (["--nproc", "4", "--parallel", "tp=2,dp_shard=1"], "expected sizes that multiply"),
        (["--nproc", "2", "--min-size", "1TiB"], "--min-size is '1TiB': expected 4 B to 16 GiB"),
        (["--nproc", "2", "--max-size", "17GiB"], "--max-size is '17GiB': expected 4 B to 16 GiB"),
        (["--nproc", "2", "--max-size", "16", "--min-size", "32"], "--min-size is '32': expected at most --max-size"),
        (["--nproc", "2", "--deadline", "0"], "--deadline is 0.0: expected seconds above 0"),
        (["--nproc", "2", "--device", "tpu"], "--device is 'tpu': expected cpu or cuda"),
        (["--nproc", "2", "--set", "parallel.tp=2"], "--set is 'parallel.tp=2': expected it beside a job file"),
        (["--parallel", "tp=2"], "--parallel is 'tp=2': expected it beside --nproc or a job file"),
        (["--set", "parallel.tp=2"], "--set is 'parallel.tp=2': expected it beside a job file"),
        (["nowhere.toml"], "nowhere.toml"),
    ],
)
def test_doctor_bad_option_is_one_line_and_exit_2(run, arguments: list[str], expected: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and expected in err and len(err.splitlines()) == 1


def asked(job: Path | None = None, **fields) -> Asked:
    given = {"nproc": None, "device": None, "parallel": None, "overrides": (), "min_size": "1KiB", "max_size": "4KiB"}
    return Asked(job, **{**given, "deadline_s": 30.0, **fields})


def test_plan_without_a_job_shards_over_what_the_axes_leave() -> None:
    assert plan_of(asked(nproc=8)).layout == Layout(dp_shard=8)
    assert plan_of(asked(nproc=8, parallel="tp=2,pp=2")).layout == Layout(pp=2, dp_shard=2, tp=2)
    assert plan_of(asked(nproc=8, parallel="tp=2, dp_shard=4")).sizes == (1024, 4096)
    assert plan_of(asked(nproc=8, device="cuda")).pairs_at_once == 4


def test_plan_of_a_job_has_its_layout_and_network(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    plan = plan_of(asked(path, overrides=["cluster.network.ib_traffic_class=106"]))
    assert plan.layout == Layout(dp_shard=2, tp=2) and plan.device == "cpu"
    assert plan.network is not None and plan.network["ib_traffic_class"] == 106
    assert plan_of(asked(path, nproc=2, overrides=["parallel.tp=1"])).layout == Layout(dp_shard=2)
    assert plan_of(asked(path, device="cuda")).backend == "nccl"
    with pytest.raises(PhalanxError, match="expected no job file beside it"):
        plan_of(asked(path, parallel="tp=2"))
    with pytest.raises(PhalanxError, match="from 2 to 256 ranks"):
        plan_of(asked(path, overrides=["parallel.tp=1", "cluster.nproc=1"]))


@pytest.mark.parametrize(
    "text, num_bytes",
    [("4", 4), ("64KiB", 65536), ("16 MiB", 16 << 20), ("1gib", 1 << 30), ("100B", 100)],
)
def test_size_is_read_with_its_unit(text: str, num_bytes: int) -> None:
    assert size_of("--max-size", text) == num_bytes


@pytest.mark.parametrize("text", ["", "3", "64KB", "1.5MiB", "-4", "KiB", "17GiB"])
def test_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PhalanxError, match="expected 4 B to 16 GiB"):
        size_of("--max-size", text)


def test_doctor_measures_and_prints_tables(run) -> None:
    code, out, err = run("--nproc", "2", "--min-size", "1KiB", "--max-size", "4KiB")
    assert code == 0, err
    assert "dp_shard (gloo)" in out and "bus GB/s" in out
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"):
        assert sum(line.startswith(f"{operation} ") for line in out.splitlines()) == 2
    assert "dp_shard: all-reduce: with 2 ranks ring and tree send the same: no crossing" in out
    assert "2 ranks are one pair, and there is no other to compare it with" in out


def test_doctor_json_has_all_figures(run) -> None:
    code, out, err = run("--nproc", "2", "--parallel", "tp=2", "--max-size", "4KiB", "--json")
    assert code == 0, err
    network = json.loads(out)["network"]
    assert (network["state"], network["backend"], network["world_size"]) == ("ok", "gloo", 2)
    assert network["layout"]["tp"] == 2 and network["slow_pairs"] == [] and network["slow_ranks"] == []
    assert len(network["measurements"]) == 7 * 2 and len(network["lines"]) == 7
    first = network["measurements"][0]
    assert first["algorithm_gb_s"] == pytest.approx(first["num_bytes"] / first["time_us"] / 1e3)
    assert first["bus_gb_s"] == pytest.approx(first["algorithm_gb_s"])
    (pair,) = network["pairs"]
    assert pair["ranks"] == [0, 1] and pair["is_slow"] is False and pair["latency_us"] > 0


def test_doctor_gpus_that_are_not_there_are_one_line_and_exit_2(run) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, err = run("--nproc", "2", "--device", "cuda", "--max-size", "4KiB")
    assert code == 2
    assert err.startswith("phalanx: --device is 'cuda': expected a GPU for each rank") and len(err.splitlines()) == 1
