"""The `phalanx data` commands in this process."""

from __future__ import annotations

import pytest
import typer

from phalanx.cli import data
from phalanx.cli.errors import run_reporting_errors


@pytest.fixture
def phalanx(monkeypatch, capsys):
    """Runs a command line; gives exit code, standard output and standard error."""

    def run(*arguments):
        app = typer.Typer()
        data.register(app)
        app.callback()(lambda: None)
        monkeypatch.setattr("sys.argv", ["phalanx", *map(str, arguments)])
        code = run_reporting_errors(app)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
