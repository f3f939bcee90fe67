"""`phalanx`: assembles the command groups; each group is one file beside this one and imports what is heavy inside its
commands.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from phalanx.cli import checkpoint, config, data, demo, doctor, init, job, plan, run, services
from phalanx.cli.errors import run_reporting_errors
from phalanx.cli.standard_output import watch_output

app = typer.Typer(
    name="phalanx",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for group in (run, init, job, services, demo, config, data, checkpoint, plan, doctor):
    group.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"phalanx {importlib.metadata.version('phalanx')}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pre-train large language models on many GPUs and keep the run alive."""


def main() -> None:
    """Entry point of the `phalanx` command: exit 0 on success, 1 when something failed, 2 when the user must change
    something.
    """
    watch_output()
    sys.exit(run_reporting_errors(app))
