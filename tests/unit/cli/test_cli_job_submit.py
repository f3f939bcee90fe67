"""`phalanx job submit`: an option that would do nothing beside the others, or says nothing, is refused before any
service is asked.
"""

from __future__ import annotations

import pytest

from phalanx.cli.errors import run_reporting_errors
from phalanx.cli.main import app

NAMELESS = [
    (["job", "submit", "x.toml"], "--request-id"),
    (["job", "submit", "--from", "x"], "--name"),
    (["job", "submit", "--from", "x"], "--request-id"),
    (["job", "resume", "x"], "--request-id"),
    (["job", "stop", "x"], "--request-id"),
    (["job", "profile", "x"], "--request-id"),
    (["data", "mix", "x", "--set", "a=1"], "--request-id"),
    (["data", "register", "x", "file:///x"], "--request-id"),
]


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the command ends, at exit code 2."""
    monkeypatch.setattr("sys.argv", ["phalanx", *words])
    assert run_reporting_errors(app) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == ""
    return line


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize(("words", "option"), NAMELESS)
def test_a_name_or_id_of_nothing_names_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], option: str, text: str
) -> None:
    line = refused(monkeypatch, capsys, *words, option, text)
    assert line.startswith(f"phalanx: Invalid value for '{option}'") and "expected some characters" in line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["x.toml", "--name", "f5"],
            "--name is 'f5': expected --from JOB@STEP beside it, as a job file says its own name; "
            "write --set 'job.name=\"f5\"' in its place",
        ),
        (
            ["x.toml", "--partial", "model.w"],
            "--partial is 'model.w': expected --from JOB@STEP beside it, as a new job restores nothing; "
            "leave it out, or write it as [checkpoint] partial into the job file",
        ),
        (
            ["--from", "x", "--partial", ""],
            "--partial is '': expected the name of a tensor; name one, or leave the option out",
        ),
        (
            ["--from", "x", "--partial", "model.w", "--set", "checkpoint.partial=model.v"],
            "--set is 'checkpoint.partial=model.v': expected no --partial beside it, which says the same key; "
            "give one of the two",
        ),
        (
            ["x.toml", "--dry-run", "--watch"],
            "--watch: expected no --dry-run beside it, which submits nothing to watch; give one of the two",
        ),
    ],
)
def test_an_option_that_would_do_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert refused(monkeypatch, capsys, "job", "submit", *words) == f"phalanx: {line}"


def test_a_fork_names_its_checkpoint_behind_the_at_sign(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(monkeypatch, capsys, "job", "submit", "--from", "x@")
    assert line == (
        "phalanx: --from is 'x@': expected a checkpoint behind the @; write JOB@STEP, or JOB for its latest"
    )
