"""`phalanx data catalog`: the datasets that are registered, their versions, and what was made from what."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.context import Context, open_client
from phalanx.cli.output import print_json, print_table
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.data.datasets import DatasetVersion

_COLUMNS = (
    "dataset",
    "version",
    "train_tokens",
    "held_out_tokens",
    "vocab_size",
    "made_from",
    "owner",
    "url",
    "digest",
)


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("catalog")(catalog)


def _check_digest(digest: str) -> None:
    """Raises PhalanxError for what is none: it would be answered as one that nothing has."""
    from phalanx.spec.data import DIGEST_PATTERN

    if digest and not re.fullmatch(DIGEST_PATTERN, digest):
        raise PhalanxError(
            "--digest",
            value=digest,
            expected="sha256: and 64 hexadecimal digits",
            remedy="write it as `phalanx data ls` prints it",
        )


def catalog(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show all versions of this dataset.", show_default=False)
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", help="Only datasets whose names begin so.")] = "",
    digest: Annotated[
        str,
        typer.Option("--digest", help="Only versions with this digest: content, split, tokenizer, input or recipe."),
    ] = "",
    owner: Annotated[str, typer.Option("--owner", help="Only versions that this subject registered.")] = "",
    made_from: Annotated[
        str, typer.Option("--made-from", metavar="NAME[@VERSION]", help="Only versions that were made from this.")
    ] = "",
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """List the newest version of each registered dataset; with a filter other than --prefix, all versions that pass."""
    from phalanx.data.datasets import Filter

    _check_digest(digest)
    wanted = Filter(prefix, digest, owner, made_from)
    with open_client(context) as client:
        found = client.data.dataset(name) if name else client.data.datasets(wanted)
        rows = [_facts(version) for version in found if wanted.passes(version)]
    if as_json:
        print_json({"versions": rows})
    else:
        print_table(_COLUMNS, ([_shown(row, column) for column in _COLUMNS] for row in rows))


def _facts(version: DatasetVersion) -> dict[str, Any]:
    return {**asdict(version), "digest": version.digest, "url": version.url}


def _shown(row: dict[str, Any], column: str) -> object:
    if column == "made_from":
        return [f"{each['dataset']}@{each['version']}" for each in row["parents"]]
    if column.endswith("_tokens"):
        return sum(each["num_tokens"] for each in row["splits"] if each["name"] == column.removesuffix("_tokens"))
    value: object = row[column]
    return value
