"""The `phalanx data` group: text and tokens to shards, what came out, the catalog; a file for each command."""

from __future__ import annotations

import typer

from phalanx.cli.data import catalog, importing, ls, mix, prepare, registering, show, trace, verify


def register(app: typer.Typer) -> None:
    """Adds the `data` group to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Prepare text, and look at datasets.")
    for command in (prepare, importing, ls, show, verify, trace, mix, registering, catalog):
        command.register(group)
    app.add_typer(group, name="data")
