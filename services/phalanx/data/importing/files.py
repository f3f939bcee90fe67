"""The files of an import below one root, on a disk or in a bucket, read by ranges."""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from phalanx.core.errors import PhalanxError
from phalanx.data.importing.errors import BadTokens
from phalanx.data.prepare.inputs.ahead import ahead
from phalanx.data.prepare.inputs.apart import Searched
from phalanx.data.prepare.inputs.folders import walk
from phalanx.data.prepare.inputs.objects import InputObject, SeekingStream
from phalanx.objects import ObjectMissing, open_store
from phalanx.objects.file import FileStore, translated

S3, FILE = "s3://", "file://"
_AT_ONCE = 32
LOG = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")


class Files:
    """Files by their paths below `root`, a `file://` or `s3://` URL of a folder."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._store = open_store(root)

    def size(self, path: str) -> int | None:
        """Bytes of a file, None where there is none (a folder is none). Raises BadTokens for a link that leads nowhere
        and for what is neither: opening a pipe would wait for ever.
        """
        if path and isinstance(self._store, FileStore):
            _require_file_or_folder(self._store.root / path)
        try:
            return self._store.info(path).num_bytes if path else None
        except ObjectMissing:
            return None

    def is_folder(self, path: str) -> bool:
        """Whether anything lies below `path`."""
        if isinstance(self._store, FileStore):
            folder = self._store.root / path
            with translated(folder):
                return folder.is_dir() and any(folder.iterdir())
        return next(iter(self._store.children(f"{path}/" if path else "")), None) is not None

    def below(self, path: str) -> list[str]:
        """All files at any depth below a folder, sorted; names with a leading dot or underscore are left out. On a disk
        so are links to folders, links that lead nowhere, pipes and the like: a warning counts them.
        """
        prefix = f"{path}/" if path else ""
        if isinstance(self._store, FileStore):
            left_out: Counter[str] = Counter()
            found = sorted(f"{prefix}{file.path}" for file in walk(str(self._store.root / path), left_out))
            if left_out:
                kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(left_out.items()))
                LOG.warning("%s: left out: %s", self.shown(path), kinds)
        else:
            found = [info.key for info in self._store.list(prefix)]
        return [key for key in found if not any(part[:1] in "._" for part in key.removeprefix(prefix).split("/"))]

    def open(self, path: str, num_bytes: int) -> InputObject:
        """A file as it was listed; reading one that changed since raises ChangedInput."""
        return InputObject(self._store, path, num_bytes)

    def seekable(self, path: str, num_bytes: int) -> BinaryIO:
        """A file as a stream that can be sought in."""
        return cast(BinaryIO, SeekingStream(self.open(path, num_bytes)))

    def existing_size(self, path: str) -> int:
        """Bytes of a file that must be there; raises BadTokens where it is not."""
        size = self.size(path)
        if size is None:
            raise BadTokens(self.shown(path), expected="a file", remedy="it is missing: copy it, or name another input")
        return size

    def each(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """`work` on every item, many at once, in order: asking a bucket takes time."""
        return list(ahead(work, items, _AT_ONCE))

    def shown(self, path: str) -> str:
        """A file as errors name it: the whole path or URL."""
        return f"{self.root.removeprefix(FILE).rstrip('/')}/{path}" if path else self.root.removeprefix(FILE)


def _require_file_or_folder(path: Path) -> None:
    """Raises BadTokens for what is there and neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except PermissionError:
        return  # whoever opens it says what is wrong
    except OSError:
        if path.is_symlink():
            raise BadTokens(
                str(path), expected="a file", remedy="it is a link that leads nowhere: mend it, or name another input"
            ) from None
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise BadTokens(
            str(path), expected="a file", remedy="it is a pipe, socket or device: copy what it gives to a file"
        )


def rooted(inputs: Sequence[str]) -> tuple[Files, tuple[str, ...]]:
    """The deepest folder that all inputs share, and the inputs' paths below it ("": the folder itself).

    inputs: paths, `file://` and `s3://` URLs. Raises PhalanxError where they lie on different stores.
    """
    if not inputs or "" in inputs:
        raise PhalanxError(
            "INPUT", value="" if inputs else None, expected="a file, a folder or an s3:// URL", remedy="name one"
        )
    locations = list(dict.fromkeys(_location(each) for each in inputs))
    parts = [location.split("/") for location in locations]
    shared = [each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))]
    if len(shared) < 3 or (locations[0].startswith(S3) and not shared[2]):
        raise PhalanxError(
            "INPUT", value=list(inputs), expected="inputs on one disk or in one bucket", remedy="import them apart"
        )
    depth = len(shared)
    if depth == len(parts[0]) and not Files("/".join(shared)).is_folder(""):
        depth -= 1  # one file is named: its folder is the root
    root = "/".join(shared[:depth])
    return Files(root if root != FILE else "file:///"), tuple("/".join(each[depth:]) for each in parts)


def searched(inputs: Sequence[str]) -> tuple[Searched, ...]:
    """The inputs that are no single files: folders, and prefixes, which may become folders."""
    files, paths = rooted(inputs)
    return tuple(Searched(files.shown(path)) for path in paths if files.size(path) is None)


def _location(given: str) -> str:
    """An absolute URL without a trailing slash."""
    if given.startswith(S3):
        return given.rstrip("/")
    if "://" in given and not given.startswith(FILE):
        raise PhalanxError(given, expected="a path, file:// or s3:// URL", remedy="name one of these")
    if given.startswith(FILE):
        return open_store(given).url.rstrip("/")
    return FILE + os.path.abspath(Path(given).expanduser())  # noqa: PTH100 - resolve() would follow links
