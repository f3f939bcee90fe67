"""A command that waits for storage says so with its first failed try, once."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import typer

from phalanx import objects
from phalanx.cli import data, doctor
from phalanx.cli.errors import run_reporting_errors
from phalanx.objects import open_store
from phalanx.objects.retry import Deadline, TransientError, retry


def app_of(*register: Callable[[typer.Typer], None]) -> typer.Typer:
    app = typer.Typer()
    for each in register:
        each(app)
    app.callback()(lambda: None)
    return app


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket at an address where nobody listens, with a short deadline."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    for name, value in {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(objects, "open_store", lambda url, settings=None, deadline_s=60: open_store(url, settings, 1))
    return "s3://nobody/d"


@pytest.mark.parametrize("arguments", [["data", "ls"], ["data", "show"], ["data", "verify"], ["data", "ls", "--json"]])
def test_store_out_of_reach_is_told_with_the_first_try_then_at_the_deadline(
    arguments: list[str], nobody: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["phalanx", *arguments, nobody])
    assert run_reporting_errors(app_of(data.register)) == 1
    out, err = capsys.readouterr()
    first, last = err.splitlines()
    assert first.startswith(f"phalanx: {nobody}/manifest.json: the first try failed, others follow for up to 1 s: ")
    assert "at the deadline" in last and not out


def test_doctor_is_told_too(nobody: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["phalanx", "doctor", "--storage", nobody, "--deadline", "1"])
    run_reporting_errors(app_of(doctor.register))
    assert capsys.readouterr().err.count("the first try failed") == 1


def test_of_many_calls_that_are_tried_again_one_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(name: int) -> int:
        def fails_twice(number: int) -> int:
            if number < 2:
                raise TransientError("busy")
            return name

        return retry(f"object {name}", Deadline(30), fails_twice)

    app = typer.Typer()

    @app.command()
    def read() -> None:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(call, range(8))) == list(range(8))

    monkeypatch.setattr("sys.argv", ["phalanx"])
    for _ in range(2):
        assert run_reporting_errors(app) == 0
        assert capsys.readouterr().err.count("\n") == 1
    call(1)
    assert not capsys.readouterr().err
