"""`phalanx data ls`: the splits at or below a URL."""

from __future__ import annotations

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.data.arguments import Url
from phalanx.cli.output import print_json, print_table


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("ls")(ls)


def ls(url: Url, as_json: AsJson = False) -> None:
    """List the splits at or below a URL."""
    from phalanx.data.catalog import splits_at
    from phalanx.objects import open_store

    rows = [found.facts() for found in splits_at(open_store(url))]
    if as_json:
        print_json({"url": url, "splits": rows})
    else:
        columns = ("path", "name", "is_held_out", "shards", "documents", "tokens", "bytes", "digest")
        print_table(columns, ([row[column] for column in columns] for row in rows))
