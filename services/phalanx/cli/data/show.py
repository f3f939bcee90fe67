"""`phalanx data show`: what is in a dataset."""

from __future__ import annotations

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.data.arguments import Url
from phalanx.cli.output import print_json


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("show")(show)


def show(url: Url, as_json: AsJson = False) -> None:
    """Show a split, or every split of a dataset, with the recipe it was made by."""
    from phalanx.data.catalog import splits_at
    from phalanx.objects import open_store

    splits = [{**found.facts(), "recipe": found.split.recipe} for found in splits_at(open_store(url))]
    if as_json:
        print_json({"url": url, "splits": splits})
        return
    for split in splits:
        for key, value in split.items():
            typer.echo(f"{key:<18} {value}")
        typer.echo("")
