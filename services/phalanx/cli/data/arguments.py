"""Arguments that several `data` commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Dataset or split folder: file:// or s3://.", show_default=False)
]
