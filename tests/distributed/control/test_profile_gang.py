"""A profile of a real gang, from the request to what `phalanx job profile` lists and downloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.jobs import write_job
from typer.testing import CliRunner

from phalanx.cli.main import app
from phalanx.gang import Event, ForkServer, GangOrder
from phalanx.lineage import Lineage
from phalanx.lineage.profiles import Profiles
from phalanx.spec import load_job
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import prepare, to_arguments

pytestmark = pytest.mark.distributed
PATIENCE_S = 80.0
STEPS = 2


def command(*arguments: str) -> Any:
    """What `phalanx job profile` prints as JSON."""
    done = CliRunner().invoke(app, ["job", "profile", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, corpus: str, server: ForkServer) -> tuple[Path, list[Event]]:
    """The file of a job of two ranks, of which rank 1 was profiled from its second step on; and its phases."""
    folder = Path(tmp_path_factory.mktemp("profile"))
    path = write_job(folder, corpus, steps=8)
    job = load_job(path)
    Profiles(job_store(job)).ask(STEPS, (1,), "before the start")
    prepared = prepare(job, 2)
    arguments = to_arguments(prepared) | {"debug_rank": None}
    gang = server.start(GangOrder(2, "slow_ranks:run", folder / "logs", arguments, attempt=1))
    try:
        phases = [event for event in gang.events(PATIENCE_S) if event.kind == "phase"]
        assert gang.over, gang.stacks(5.0)
    finally:
        outcome = gang.end(0.0)
    assert outcome.ok, outcome.first_cause
    assert Lineage(job_store(job)).newest_attempt() is not None
    return path, phases


@pytest.fixture(scope="module")
def path(profiled: tuple[Path, list[Event]]) -> Path:
    return profiled[0]


def test_measured_steps_are_a_phase_of_their_own_on_all_ranks(profiled: tuple[Path, list[Event]]) -> None:
    """By the phases a gang learns how long a step takes: the profiler's seconds must not make it hung."""
    turns = [(event.rank, event.fields["name"]) for event in profiled[1] if event.fields["name"] in ("step", "profile")]
    by_rank = [[name for each, name in turns if each == rank] for rank in (0, 1)]
    assert len(by_rank[0]) == len(by_rank[1])
    for names in by_rank:
        first = names.index("profile")
        assert names[first : first + 2 * STEPS + 1] == ["profile"] * (2 * STEPS + 1)


def test_profile_of_a_running_gang_is_listed_and_downloaded(path: Path, tmp_path: Path) -> None:
    (listed,) = command(str(path), "--list")["profiles"]
    assert (listed["steps"], listed["ranks"], listed["attempt"], listed["ranks_done"]) == (STEPS, [1], 1, [1])
    files = command(str(path), "--out", str(tmp_path / "traces"))["files"]
    assert [Path(file).name for file in files] == ["00000001-r00000001-memory.json", "00000001-r00000001-trace.json"]
    trace = json.loads(Path(files[1]).read_text())
    names = [str(event.get("name")) for event in trace["traceEvents"]]
    steps = {name for name in names if name.startswith("step ")}
    assert len(steps) == STEPS
    assert any(name.startswith("gloo:") for name in names) and "aten::mm" in names
    assert trace["phalanx"]["job_rank"] == 1


def test_summary_tells_how_much_of_a_ranks_communication_had_computation_beside_it(path: Path) -> None:
    (rank,) = command(str(path), "--summary", "1")["ranks"]
    assert (rank["rank"], rank["steps"]) == (1, STEPS)
    assert 0 < rank["computing_s"] < rank["wall_s"] and 0 < rank["communication_s"] < rank["wall_s"]
    assert 0 <= rank["communication_beside_computing"] <= 1


def test_profile_of_a_rank_that_the_job_does_not_have_is_refused(path: Path) -> None:
    done = CliRunner().invoke(app, ["job", "profile", str(path), "--ranks", "0,2"])
    assert done.exit_code != 0 and "expected ranks from 0 to 1" in str(done.exception)
    done = CliRunner().invoke(app, ["job", "profile", str(path), "--ranks", "0;1"])
    assert done.exit_code != 0 and "expected ranks like 0,5" in str(done.exception)
