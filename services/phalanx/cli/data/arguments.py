"""Arguments that several `data` commands take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.places import given
from phalanx.core.errors import PhalanxError


def url_of(given: str) -> str:
    """`given` where it is a URL. Raises PhalanxError for a path, with the URL that means it."""
    if "://" in given:
        return lasting(given)
    raise PhalanxError(
        given, expected="the URL of a dataset or split folder, not a path", remedy=f"write {file_url(given)}"
    )


def lasting(url: str) -> str:
    """`url`, unless what it holds ends with the process that wrote it: then it raises PhalanxError."""
    if url.startswith("memory://"):
        raise PhalanxError(
            url,
            expected="file:///absolute/folder or s3://bucket/prefix",
            remedy="what is written to memory is gone when a command ends",
        )
    return url


def file_url(path: str) -> str:
    """The URL of a path on this machine, as a person would write it."""
    if path.startswith("~"):
        return f"file://{path}"
    return f"file://{'' if Path(path).is_absolute() else './'}{path.removeprefix('./')}"


def refuse_folder(given: str, wanted: str) -> None:
    """Raises PhalanxError for a folder where `wanted` (a job, say) is expected, with the URL that means the folder's
    data.
    """
    if "://" not in given and Path(given).expanduser().is_dir():
        raise PhalanxError(
            given, expected=f"{wanted}, not a folder", remedy=f"of a dataset's folder write {file_url(given)}"
        )


Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="Dataset or split folder: file:// or s3://.",
        show_default=False,
        parser=given,
        callback=url_of,
    ),
]


def refuse(given: Mapping[str, object], beside: str) -> None:
    """Raises PhalanxError for the first option that was given (is not None): beside that it has no effect."""
    for option, value in given.items():
        if value is not None:
            raise PhalanxError(
                option, value=value, expected=f"no such option with {beside}", remedy="leave one of them out"
            )
