"""`phalanx init DIR`: a project of the user's own to start from, with comments that teach."""

from __future__ import annotations

import shutil
import tempfile
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.places import given_path
from phalanx.core.errors import PhalanxError
from phalanx.trainer.packing import IGNORE_FILE

TEMPLATES = ("custom-model",)
_STORED_AS = {"phalanxignore": IGNORE_FILE}  # a package leaves files out whose names begin with a dot


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(init)


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to make; it must be new or empty.", parser=given_path)
    ],
    template: Annotated[str, typer.Option(help=f"What to start from: {', '.join(TEMPLATES)}.")] = TEMPLATES[0],
) -> None:
    """Make a project with a model, a loss, tests and a job file of your own."""
    if template not in TEMPLATES:
        raise PhalanxError(
            "--template", value=template, expected=f"one of {', '.join(TEMPLATES)}", remedy="choose one of them"
        )
    write_template(template, folder)
    typer.echo(f"{folder}: a {template} project; its README.md says how to go on")


def write_template(template: str, folder: Path) -> None:
    """Makes `folder`, whole or not at all. Raises PhalanxError where it holds something, or can't be written."""
    folder = folder.absolute()
    source = resources.files("phalanx.cli").joinpath("starters", template)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise PhalanxError(
                "DIR", value=str(folder), expected="a new or an empty folder", remedy="choose another one"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as unfinished:
            whole = Path(unfinished) / "whole"
            _copy(source, whole)
            whole.rename(folder)
    except OSError as error:
        raise PhalanxError(
            "DIR",
            value=str(folder),
            expected=f"a folder that can be made ({error.strerror})",
            remedy="choose another one",
        ) from error


def _copy(source: Traversable, target: Path) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                _copy(entry, target / entry.name)
            continue
        with entry.open("rb") as data, (target / _STORED_AS.get(entry.name, entry.name)).open("wb") as out:
            shutil.copyfileobj(data, out)
