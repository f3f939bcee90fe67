"""`phalanx data register`: a dataset into the catalog of the services."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.context import Context, RequestId, open_client
from phalanx.cli.data.arguments import Url
from phalanx.cli.output import print_json


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("register")(register_dataset)


def register_dataset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the dataset in the catalog.")],
    url: Url,
    request_id: RequestId = None,
    made_from: Annotated[
        list[str] | None,
        typer.Option(
            "--made-from",
            metavar="NAME@VERSION",
            help="A registered version that it was made from; may be given again.",
            show_default=False,
        ),
    ] = None,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Add what `phalanx data prepare` wrote to the catalog of the services."""
    with open_client(context) as client:
        version = client.register(name, url, request_id=request_id or "", made_from=made_from or ())
    facts = {**asdict(version), "digest": version.digest}
    if as_json:
        print_json(facts)
        return
    splits = ", ".join(f"{split.name} {split.num_tokens:,} tokens" for split in version.splits)
    typer.echo(f"{version.dataset} version {version.version}: {splits}")
