"""A dataset never lies in its own input: the next start would read what the first one wrote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.inputs.globs import Glob
from phalanx.data.prepare.inputs.opening import S3
from phalanx.objects import ObjectStore
from phalanx.objects.file import FileStore

_WRITTEN = ("recipe.json", "train/train-00000000.tar", "chunks/00000000-00000.end.safetensors")


@dataclass(frozen=True, slots=True)
class Searched:
    """A folder in which the files of an input were looked for, by a pattern below it ("": all were taken).

    folder: an absolute path on this machine, or an s3:// URL without a slash at its end.
    """

    folder: str
    pattern: str = ""


def require_apart(out: ObjectStore, searched: Iterable[Searched]) -> None:
    """Raises PhalanxError where `out` lies in a folder of the input, and what is written there would be input."""
    for each in searched:
        below = _below(out, each.folder)
        if below is None:
            continue
        written = [(PurePosixPath(below) / name).as_posix() for name in _WRITTEN]
        if not each.pattern or any(map(Glob(each.pattern).matches, written)):
            raise PhalanxError(
                "--out",
                value=out.url,
                expected=f"a folder outside of the input {each.folder}",
                remedy="what is written there would be read as input: name another --out folder",
            )


def _below(out: ObjectStore, folder: str) -> str | None:
    """The path of `out` below a folder ("" or ".": it is the folder); None where it lies elsewhere."""
    if folder.startswith(S3):
        is_below = f"{out.url}/".startswith(f"{folder}/")
        return out.url.removeprefix(folder).strip("/") if is_below else None
    if not isinstance(out, FileStore):
        return None
    target, there = out.root.resolve(), Path(folder).resolve()
    return target.relative_to(there).as_posix() if target.is_relative_to(there) else None
