"""`phalanx doctor --nproc`: what it asks for, what it refuses, what it prints."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from phalanx.cli import doctor
from phalanx.cli.doctor_network import Asked, as_json, exit_code, plan_of, show, size_of
from phalanx.cli.errors import run_reporting_errors
from phalanx.core.errors import PhalanxError
from phalanx.fabric.launched import launched_world
from phalanx.fabric.report import report_of
from phalanx.fabric.run import num_phases
from phalanx.gang import Cause, Event, GangOutcome
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
    with pytest.raises(PhalanxError, match="expected 1, since `phalanx doctor` starts ranks on this machine only"):
        plan_of(asked(path, overrides=["cluster.nodes=2"]))
    assert plan_of(asked(path, nproc=4, overrides=["cluster.nodes=2"])).world_size == 4
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


HANG = Cause("hang", 1, "in phase 'all_reduce over tp, 4,096 bytes' of step 3 for 31.0 s (its deadline: 30 s)")


@pytest.mark.parametrize(
    "outcome, code, said",
    [
        (GangOutcome("failed", HANG, ()), 1, "phalanx: the measurement failed: hang of rank 1: in phase 'all_reduce"),
        (
            GangOutcome("failed", Cause("user_error", 0, "--device is 'cuda': ..."), ()),
            2,
            "phalanx: --device is 'cuda'",
        ),
        (GangOutcome("stopped", Cause("interrupted", None, "ended on request"), ()), 130, ""),
    ],
)
def test_measurement_that_failed_is_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], outcome: GangOutcome, code: int, said: str
) -> None:
    assert exit_code(outcome, None) == code
    err = capsys.readouterr().err
    assert err.startswith(said) and len(err.splitlines()) == (1 if said else 0)


def test_doctor_under_torchrun_measures_its_ranks_and_rank_0_tells() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "phalanx.cli", "doctor", "--parallel", "tp=2", "--max-size", "4KiB", "--json"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*launch, *command], capture_output=True, text=True, timeout=110, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    network = json.loads(done.stdout)["network"]
    assert network["state"] == "ok" and network["layout"]["tp"] == 2 and len(network["measurements"]) == 7 * 2
    assert [each["ranks"] for each in network["pairs"]] == [[0, 1]]


def test_number_of_ranks_is_torchruns_own() -> None:
    assert launched_world({"RANK": "1", "WORLD_SIZE": "4"}) is None
    assert launched_world({"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}) == 4
    assert asked(launched=4).is_wanted and plan_of(asked(launched=4)).layout == Layout(dp_shard=4)
    with pytest.raises(PhalanxError, match="--nproc is 2: expected the 4 ranks that torchrun started"):
        asked(launched=4, nproc=2).is_wanted  # noqa: B018


def test_failure_as_json_names_the_rank() -> None:
    told = as_json(plan_of(asked(nproc=2)), GangOutcome("failed", HANG, ()), None)
    assert told["state"] == "failed" and told["cause"]["rank"] == 1 and told["cause"]["kind"] == "hang"
    assert "measurements" not in told


def test_slow_pair_is_printed_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(asked(nproc=4))
    pairs = [
        Event(
            a, "pair", {"ranks": [a, b], "sweep": 0, "latency_s": 5e-5, "time_s": 0.5 if (a, b) == (1, 3) else 1e-3}, 0
        )
        for a, b in itertools.combinations(range(4), 2)
    ]
    report, outcome = report_of(plan, pairs), GangOutcome("ok", None, ())
    assert exit_code(outcome, report) == 1
    show(report)
    good = "a good pair: 50 us one way, 1 ms for 1 MiB"
    said = f"the pair of ranks 1 and 3 is slow: 50 us one way, 500 ms for 1 MiB ({good})"
    assert said in capsys.readouterr().out
    told = as_json(plan, outcome, report)
    assert [each["ranks"] for each in told["pairs"] if each["is_slow"]] == [(1, 3)] and told["said"] == (said,)
    healthy = report_of(plan, [each for each in pairs if each.fields["ranks"] != [1, 3]])
    assert exit_code(outcome, healthy) == 0


def test_nccl_measures_each_algorithm_by_ranks_of_their_own() -> None:
    gloo, nccl = plan_of(asked(nproc=4)), plan_of(asked(nproc=4, device="cuda"))
    assert set(gloo.operations) - set(nccl.operations) == {"all_reduce_ring", "all_reduce_tree"}
    num_sizes = len(nccl.sizes)
    assert num_phases(gloo) == gloo.num_phases
    assert num_phases(nccl) == nccl.num_phases + 2 * (num_sizes + 2)
