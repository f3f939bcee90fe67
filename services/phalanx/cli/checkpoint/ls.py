"""`phalanx checkpoint ls`: the checkpoints of a job."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from phalanx.cli.checkpoint.arguments import Job
from phalanx.cli.checkpoint.progress import measured, size
from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context
from phalanx.cli.output import print_json, print_table


def register(group: typer.Typer) -> None:
    """Adds the command to the `checkpoint` group."""
    group.command("ls")(list_checkpoints)


def list_checkpoints(
    job: Job,
    show_all: Annotated[bool, typer.Option("--all", help="Also those that are not live, and why.")] = False,
    context: Context = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """List the live checkpoints of a job, oldest first: size, state, what pins it, what was measured of it."""
    from phalanx.checkpoint.report import checkpoint_rows, pins_of
    from phalanx.cli.named import place_of

    place = place_of(job, overrides or (), context)
    rows = checkpoint_rows(place.store, dead=show_all, pins=pins_of(place))
    if as_json:
        print_json({"checkpoints": [dataclasses.asdict(row) for row in rows]})
        return
    table = [
        (str(row.attempt), str(row.step), str(row.world_size or "?"), size(row.num_bytes), row.state, measured(row))
        for row in rows
    ]
    print_table(("attempt", "step", "ranks", "size", "state", "measured"), table, "checkpoints")
