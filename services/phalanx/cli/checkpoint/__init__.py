"""The `phalanx checkpoint` group: what a job has saved, whether it is whole, what stays; a file for each command."""

from __future__ import annotations

import typer

from phalanx.cli.checkpoint import diff, export, importing, ls, pin, prune, show, verify


def register(app: typer.Typer) -> None:
    """Adds the `checkpoint` group to the command line."""
    group = typer.Typer(
        no_args_is_help=True, help="List, show, verify, compare, export, import, keep and remove checkpoints."
    )
    for command in (ls, show, verify, diff, export, importing, prune, pin):
        command.register(group)
    app.add_typer(group, name="checkpoint")
