"""`phalanx job profile --summary`: what it tells of stored traces, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.cli.errors import run_reporting_errors
from phalanx.cli.main import app
from phalanx.lineage import Lineage
from phalanx.lineage.profiles import Profiles
from phalanx.objects import open_store

Event = tuple[str, float, float]  # name, begin and end in seconds
STEPS: tuple[Event, ...] = (("step 4", 0.0, 1.0), ("step 5", 1.0, 2.0), ("aten::mm", 0.25, 0.75))


def trace(*events: Event) -> bytes:
    told = [{"ph": "X", "name": name, "ts": begin * 1e6, "dur": (end - begin) * 1e6} for name, begin, end in events]
    return json.dumps({"traceEvents": told}).encode()


@pytest.fixture
def profiles(tmp_path: Path) -> Profiles:
    """Of a job with a profile of two steps, whose ranks 2, 10 and 11 have stored their traces."""
    store = open_store(tmp_path.as_uri())
    digest = "sha256:" + "0" * 64
    Lineage(store).open_attempt(code_digest=digest, identity_digest=digest, placement={"world_size": 12})
    found = Profiles(store)
    found.ask(2, (), "first")
    found.put(1, 10, "trace", trace(*STEPS))
    found.put(1, 2, "trace", trace(*STEPS, ("gloo:all_gather", 0.5, 1.5)))
    found.put(1, 2, "memory", b"{}")
    found.put(1, 11, "trace", trace(*STEPS, ("gloo:all_gather", 0.25, 0.5), ("gloo:all_reduce", 3.0, 4.0)))
    return found


def told(tmp_path: Path, *words: str) -> str:
    done = CliRunner().invoke(app, ["job", "profile", tmp_path.as_uri(), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the command ends, at exit code 2."""
    monkeypatch.setattr("sys.argv", ["phalanx", "job", "profile", *words])
    assert run_reporting_errors(app) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_summary_tells_of_each_rank_that_stored_its_trace(profiles: Profiles, tmp_path: Path) -> None:
    found: dict[str, Any] = json.loads(told(tmp_path, "--summary", "1", "--json"))
    assert found["profile"] == 1 and [each["rank"] for each in found["ranks"]] == [2, 10, 11]
    assert found["ranks"][0] == {
        "rank": 2,
        "steps": 2,
        "wall_s": 2.0,
        "computing_s": 0.5,
        "communication_s": 1.0,
        "communication_beside_computing": 0.25,
    }
    alone, hidden = found["ranks"][1:]
    assert (alone["communication_s"], alone["communication_beside_computing"]) == (0.0, None)
    assert (hidden["communication_s"], hidden["communication_beside_computing"]) == (0.25, 1.0)


def test_summary_is_a_table_with_a_row_for_each_rank(profiles: Profiles, tmp_path: Path) -> None:
    lines = told(tmp_path, "--summary", "1").splitlines()
    assert lines[0].split() == ["profile", "1"]
    assert [line.split() for line in lines[-3:]] == [
        ["2", "2", "2.000", "0.500", "1.000", "25%"],
        ["10", "2", "2.000", "0.500", "0.000", "-"],
        ["11", "2", "2.000", "0.500", "0.250", "100%"],
    ]


def test_summary_of_a_profile_without_traces_says_so(profiles: Profiles, tmp_path: Path) -> None:
    profiles.ask(1, (), "second")
    assert "profile 2: no trace is stored yet" in told(tmp_path, "--summary", "2")
    assert json.loads(told(tmp_path, "--summary", "2", "--json")) == {"profile": 2, "ranks": []}


def test_summary_of_no_profile_is_refused(
    profiles: Profiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(monkeypatch, capsys, tmp_path.as_uri(), "--summary", "3")
    assert "--summary is 3: expected the number of a profile of the job; see --list" in line


def test_two_things_at_once_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(monkeypatch, capsys, tmp_path.as_uri(), "--list", "--out", str(tmp_path / "traces"))
    assert "--out: expected one of --list, --summary, --out; leave it or --list out" in line


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'{"traceEvents": [{"ph": "X"}]}'])
def test_trace_that_is_none_is_named(
    data: bytes,
    profiles: Profiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    profiles.put(1, 3, "trace", data)
    line = refused(monkeypatch, capsys, tmp_path.as_uri(), "--summary", "1")
    assert "profiles/00000001/r00000003-trace.json: expected a Chrome trace of torch's profiler" in line
