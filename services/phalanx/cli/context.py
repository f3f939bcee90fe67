"""How commands reach the services: `--context`, and one client for one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.places import given_id, given_path
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.client import Client

Context = Annotated[
    Path | None,
    typer.Option(
        "--context",
        parser=given_path,
        metavar="FILE",
        help="Context of a cluster (default: $PHALANX_CONTEXT, or phalanx-home/client.toml).",
        show_default=False,
    ),
]

RequestId = Annotated[
    str | None,
    typer.Option(
        "--request-id",
        parser=given_id,
        metavar="ID",
        help="Repeat a request under its id: it counts once, and the answer is the same.",
        show_default=False,
    ),
]


def open_client(context: Path | None) -> Client:
    """The client of that context. Raises PhalanxError where the libraries for calls are not installed."""
    try:
        from phalanx.client import Client
    except ModuleNotFoundError as error:
        raise PhalanxError(
            f"module {error.name}", expected="to be installed", remedy="pip install 'phalanx[services]'"
        ) from error
    return Client(context)
