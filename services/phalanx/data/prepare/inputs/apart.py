"""A dataset never lies in its own input: the next start would read what the first one wrote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.inputs.globs import Glob
from phalanx.objects import ObjectStore
from phalanx.objects.file import FileStore

_WRITTEN = ("recipe.json", "train/train-00000000.tar", "chunks/00000000-00000.end.safetensors")


@dataclass(frozen=True, slots=True)
class Searched:
    """A local folder in which the files of an input were looked for, by a pattern below it ("": all were taken)."""

    folder: str
    pattern: str = ""


def require_apart(out: ObjectStore, searched: Iterable[Searched]) -> None:
    """Raises PhalanxError where `out` lies in a folder of the input, and what is written there would be input."""
    if not isinstance(out, FileStore):
        return
    target = out.root.resolve()
    for each in searched:
        folder = Path(each.folder).resolve()
        if not target.is_relative_to(folder):
            continue
        below = [(target / name).relative_to(folder).as_posix() for name in _WRITTEN]
        if not each.pattern or any(map(Glob(each.pattern).matches, below)):
            raise PhalanxError(
                "--out",
                value=out.url,
                expected=f"a folder outside of the input {each.folder}",
                remedy="what is written there would be read as input: name another --out folder",
            )
