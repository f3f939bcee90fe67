"""Paths, URLs and names of jobs on the command line: what names nothing is refused, by every command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from phalanx.cli.errors import run_reporting_errors
from phalanx.cli.main import app
from phalanx.cli.places import given, given_path

# What a parameter that names a file, a folder, a URL or a job is called in its help.
PLACES = ("JOB", "[JOB]", "JOB@STEP", "FILE", "DIR", "URL", "URL|JOB", "SOURCE", "INPUT...")


def _parameters() -> Iterator[tuple[str, str, object]]:
    """The words of each command, and its parameters."""
    waiting = [("", typer.main.get_command(app))]
    while waiting:
        words, command = waiting.pop()
        waiting += [(f"{words} {name}".strip(), each) for name, each in getattr(command, "commands", {}).items()]
        for parameter in command.params:
            yield words, str(parameter.name), parameter


def test_every_parameter_that_names_a_place_refuses_what_names_nothing() -> None:
    """One that is called a place, or is one for Python, is read by one of the two parsers."""
    seen = set()
    for words, name, parameter in _parameters():
        said = parameter.type_descriptor
        read_by = said.parameter_info.parser
        if parameter.metavar in PLACES or "Path" in str(said.annotation):
            assert read_by in (given, given_path), f"phalanx {words}: {name}"
            seen.add(words)
    assert {"run", "up", "demo", "doctor", "job submit", "job show", "plan", "config check", "data prepare"} <= seen
    assert {f"checkpoint {each}" for each in ("ls", "show", "verify", "diff", "export", "import", "prune")} <= seen


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["checkpoint", "export", "x.toml", "latest", "--out", ""], "'--out'"),
        (["checkpoint", "export", "x.toml", "latest", "--out", "o", "--tokenizer", " "], "'--tokenizer'"),
        (["checkpoint", "import", "", "--job", "x.toml"], "'SOURCE'"),
        (["checkpoint", "import", "x", "--job", ""], "'--job'"),
        (["checkpoint", "import", "x", "--job", "x.toml", "--step", "100000000"], "'--step'"),
        (["checkpoint", "show", ""], "'JOB'"),
        (["checkpoint", "ls", "x" * 300], "is too long: expected"),
        (["checkpoint", "ls", "x.toml", "--context", ""], "'--context'"),
        (["config", "check", ""], "'JOB'"),
        (["run", ""], "'JOB'"),
        (["up", "--storage", ""], "'--storage'"),
        (["up", "--home", ""], "'--home'"),
        (["data", "import", "good", "", "--out", "file:///x"], "'INPUT...'"),
    ],
)
def test_an_empty_or_endless_place_is_one_line_that_names_the_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    monkeypatch.setattr("sys.argv", ["phalanx", *words])
    assert run_reporting_errors(app) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("phalanx: Invalid value") and named in line


@pytest.mark.parametrize(
    "words",
    [
        ["config", "check", "{loop}"],
        ["data", "show", "file://{loop}"],
        ["data", "prepare", "x.txt", "--out", "file://{loop}/below", "--vocab-size", "500"],
        ["init", "{loop}/below"],
        ["checkpoint", "ls", "{loop}"],
    ],
)
def test_a_place_behind_links_that_lead_to_each_other_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    monkeypatch.setattr("sys.argv", ["phalanx", *(word.format(loop=tmp_path / "a") for word in words)])
    assert run_reporting_errors(app) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "lies behind symbolic links that lead to each other" in line


@pytest.mark.parametrize(
    "words",
    [
        ["data", "verify", "{closed}/x"],
        ["data", "mix", "{closed}/x", "--set", "a=1"],
        ["data", "trace", "--job", "{closed}/x", "--step", "1"],
        ["data", "prepare", "{closed}/x", "--out", "file:///x", "--vocab-size", "500"],
        ["data", "prepare", "x.txt", "--out", "file:///x", "--tokenizer", "{closed}/x"],
        ["data", "show", "file://{closed}/x"],
    ],
)
def test_a_place_in_a_folder_that_may_not_be_looked_into_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    monkeypatch.setattr("sys.argv", ["phalanx", *(word.format(closed=closed) for word in words)])
    user = os.geteuid()
    if user == 0:  # who may look into every folder
        os.seteuid(65534)
    try:
        assert run_reporting_errors(app) == 2
    finally:
        os.seteuid(user)
    (line,) = capsys.readouterr().err.splitlines()
    assert "lies in a folder that this user may not look into" in line


@pytest.mark.parametrize("words", [["data", "show"], ["data", "ls"], ["data", "merge", "--out"]])
def test_a_url_of_a_name_too_long_for_its_file_system_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["phalanx", *words, f"file://{tmp_path}/{'x' * 300}"])
    assert run_reporting_errors(app) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is too long for the file system that it lies on: expected shorter names" in line


@pytest.mark.parametrize("text", [".", "a b", "s3://bucket/" + "x" * 1000, "file:///x", "projects/p/jobs/j", "ä" * 127])
def test_a_place_that_can_be_is_taken_as_it_is(text: str) -> None:
    assert given(text) == text and given_path(text) == Path(text)


def test_parameters_with_a_parser_keep_their_place_in_the_help() -> None:
    out = CliRunner().invoke(app, ["checkpoint", "export", "--help"]).output
    assert "--out" in out and "DIR" in out and "GIVEN" not in out
