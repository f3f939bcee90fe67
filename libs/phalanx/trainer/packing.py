"""A folder of the user's own code as one archive whose bytes follow from names and contents alone, and back.

What is packed: every regular file below the folder, and symbolic links that stay inside it. Left out: names that begin
with a dot, compiled Python, virtual environments, `node_modules`, what `.phalanxignore` in the folder names, and what
the caller excludes. The same tree gives the same archive on every machine: sorted names, no times, no owners, only the
bit that makes a file executable. A tree that was unpacked gives the archive that it came from, so it can be verified by
packing it again. Free of torch.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from phalanx.core.digest import sha256
from phalanx.core.errors import PhalanxError

MAX_FILES, MAX_BYTES = 2000, 64 << 20
MOST_LOOKED_AT = 10 * MAX_FILES
IGNORE_FILE = ".phalanxignore"
_LEFT_OUT = ("__pycache__", "*.pyc", "*.pyo", "*.egg-info", "node_modules")
_KEY = "code.path"


@dataclass(frozen=True, slots=True)
class Archive:
    """An uncompressed tar and its digest. modules: what `import` finds at its top, by the file that it is."""

    data: bytes
    digest: str
    modules: Mapping[str, PurePosixPath]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file or a link. name: below the folder. target: of a link, below the folder too."""

    name: PurePosixPath
    path: Path
    num_bytes: int = 0
    target: PurePosixPath | None = None


def pack(folder: Path, excluded: Collection[Path] = ()) -> Archive:
    """The archive of `folder`. excluded: files and folders that are left out as well.

    Raises PhalanxError where there is no such folder, it holds no Python file, too much, or something that no archive
    can hold: a link that leads out of it, a pipe, a file that can't be read.
    """
    root = folder.resolve()
    if not root.is_dir():
        raise PhalanxError(_KEY, value=str(folder), expected="a folder", remedy="correct the path")
    entries = _within_limits(folder, _entries(root, _patterns(root), {path.resolve() for path in excluded}))
    if not any(entry.name.suffix == ".py" for entry in entries):
        raise PhalanxError(
            _KEY, value=str(folder), expected="a folder with Python files", remedy=f"correct it or {IGNORE_FILE}"
        )
    _check_links(entries)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in sorted(entries, key=lambda each: str(each.name)):
            info, data = _member(entry)
            archive.addfile(info, None if data is None else io.BytesIO(data))
    data = buffer.getvalue()
    return Archive(data, sha256(data), {name: path for entry in entries for name, path in _modules(entry.name)})


def _modules(path: PurePosixPath) -> Iterator[tuple[str, PurePosixPath]]:
    if path.name == "__init__.py" and len(path.parts) == 2:
        yield path.parts[0], path.parent
    elif path.suffix == ".py" and len(path.parts) == 1:
        yield path.stem, path


def unpack(data: bytes, folder: Path) -> None:
    """Lays the archive out below `folder`, which is empty. Raises ValueError for one that `pack` has not made."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                if not (member.isreg() or member.issym()):
                    raise ValueError(f"{member.name} is neither a file nor a link")
                archive.extract(member, folder, filter="data")
    except tarfile.TarError as error:
        raise ValueError(str(error)) from error


def _patterns(root: Path) -> tuple[str, ...]:
    """The lines of the ignore file, without comments."""
    path = root / IGNORE_FILE
    try:
        text = path.read_text() if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise PhalanxError(str(path), expected=f"a readable text ({error})", remedy="correct it") from error
    patterns = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    for pattern in patterns:
        if pattern.startswith("!"):
            raise PhalanxError(
                str(path), value=pattern, expected="patterns of what is left out", remedy="remove the line with `!`"
            )
    return patterns


def _is_ignored(name: PurePosixPath, is_folder: bool, patterns: Sequence[str]) -> bool:
    """By the last part of a name; the folders above have been looked at. A pattern with a `/` inside is compared with
    the whole name, one that ends with it with folders alone.
    """
    if name.name.startswith(".") or any(fnmatchcase(name.name, pattern) for pattern in _LEFT_OUT):
        return True
    for pattern in patterns:
        if pattern.endswith("/") and not is_folder:
            continue
        bare = pattern.strip("/")
        if fnmatchcase(str(name) if "/" in bare or pattern.startswith("/") else name.name, bare):
            return True
    return False


def _entries(root: Path, patterns: Sequence[str], excluded: Collection[Path]) -> Iterator[_Entry]:
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            found = sorted(os.scandir(folder), key=lambda each: each.name)
        except OSError as error:
            raise _unreadable(folder, error) from error
        for item in found:
            path = Path(item.path)
            name = PurePosixPath(path.relative_to(root).as_posix())
            is_folder = item.is_dir(follow_symlinks=False)
            if path in excluded or _is_ignored(name, is_folder, patterns):
                continue
            if item.is_symlink():
                yield _Entry(name, path, target=_target(root, path))
            elif not is_folder:
                yield _Entry(name, path, _size(path))
            elif not (path / "pyvenv.cfg").exists():
                folders.append(path)


def _size(path: Path) -> int:
    try:
        found = path.stat()
        str(path).encode()
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeEncodeError as error:
        raise PhalanxError(_KEY, value=repr(path), expected="names in UTF-8", remedy="rename the file") from error
    if not stat.S_ISREG(found.st_mode):
        raise PhalanxError(
            _KEY, value=str(path), expected="files, folders and links", remedy=f"remove it, or list it in {IGNORE_FILE}"
        )
    return found.st_size


def _target(root: Path, link: Path) -> PurePosixPath:
    try:
        return PurePosixPath(link.resolve(strict=True).relative_to(root).as_posix())
    except (OSError, RuntimeError, ValueError) as error:
        raise PhalanxError(
            _KEY,
            value=f"{link} -> {link.readlink()}",
            expected="links to what lies in the folder",
            remedy=f"put a copy in its place, or list it in {IGNORE_FILE}",
        ) from error


def _within_limits(folder: Path, entries: Iterator[_Entry]) -> list[_Entry]:
    kept: list[_Entry] = []
    bytes_below: Counter[str] = Counter()
    files_below: Counter[str] = Counter()
    for entry in entries:
        kept.append(entry)
        bytes_below[entry.name.parts[0]] += entry.num_bytes
        files_below[entry.name.parts[0]] += 1
        if len(kept) >= MOST_LOOKED_AT:
            break
    num_bytes = bytes_below.total()
    if len(kept) <= MAX_FILES and num_bytes <= MAX_BYTES:
        return kept
    largest, _ = (bytes_below if num_bytes > MAX_BYTES else files_below).most_common(1)[0]
    more = "more than " if len(kept) >= MOST_LOOKED_AT else ""
    raise PhalanxError(
        _KEY,
        value=str(folder),
        expected=f"at most {MAX_FILES:,} files and {MAX_BYTES >> 20} MiB, found {more}{len(kept):,} files with "
        f"{num_bytes / 2**20:,.1f} MiB ({largest}: {files_below[largest]:,} files, "
        f"{bytes_below[largest] / 2**20:,.1f} MiB)",
        remedy=f"list what ranks don't import in {folder / IGNORE_FILE}",
    )


def _check_links(entries: Sequence[_Entry]) -> None:
    """A link to what is left out would lead nowhere."""
    there = {parent for entry in entries for parent in (entry.name, *entry.name.parents)}
    for entry in entries:
        if entry.target is not None and entry.target not in there:
            raise PhalanxError(
                _KEY,
                value=f"{entry.name} -> {entry.target}",
                expected="links to what is packed too",
                remedy=f"list the link in {IGNORE_FILE}, or take its target out of there",
            )


def _member(entry: _Entry) -> tuple[tarfile.TarInfo, bytes | None]:
    info = tarfile.TarInfo(str(entry.name))
    if entry.target is not None:
        info.type, info.mode = tarfile.SYMTYPE, 0o777
        info.linkname = os.path.relpath(entry.target, entry.name.parent)
        return info, None
    try:
        data = entry.path.read_bytes()
        is_executable = entry.path.stat().st_mode & stat.S_IXUSR
    except OSError as error:
        raise _unreadable(entry.path, error) from error
    info.size, info.mode = len(data), 0o755 if is_executable else 0o644
    return info, data


def _unreadable(path: Path, error: OSError) -> PhalanxError:
    return PhalanxError(
        _KEY,
        value=str(path),
        expected=f"what can be read ({error.strerror})",
        remedy=f"change its permissions, or list it in {IGNORE_FILE}",
    )
