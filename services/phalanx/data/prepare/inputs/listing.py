"""What the user named, listed: files, folders, patterns, on disks and in buckets, in one deterministic order.

A folder stands for all files below it whose suffix we know, in the order of their paths; hidden ones are left out, and
so are links to folders. A file named in full, or by a pattern that spells its suffix, is taken whatever it is called.
Several inputs keep the order in which they were named; a file that several of them name is read once. All paths are
relative to the deepest folder that the inputs share: one root, so that ids of files in different inputs differ.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.inputs.apart import Searched
from phalanx.data.prepare.inputs.folders import walk
from phalanx.data.prepare.inputs.formats import format_of
from phalanx.data.prepare.inputs.globs import Glob, is_pattern, split_pattern
from phalanx.data.prepare.inputs.opening import S3, location_of, split_url
from phalanx.data.prepare.inputs.pieces import InputFile
from phalanx.objects import ObjectMissing, open_store
from phalanx.objects.file import FileStore

_KNOWN = ".txt, .md, source files, .jsonl, .parquet, .tar, and .gz or .zst of these"


@dataclass(frozen=True, slots=True)
class Listing:
    """Files below `root`, in reading order ("": they share no root, and their paths are whole ones and URLs).

    left_out: how many files were not taken, by suffix. searched: the folders and prefixes that were looked into.
    """

    root: str
    files: tuple[InputFile, ...]
    left_out: dict[str, int]
    searched: tuple[Searched, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """What one input stands for: files by whole path or URL, below a folder."""

    folder: str
    files: list[InputFile]
    left_out: Counter[str]
    searched: Searched | None = None


def list_inputs(inputs: Sequence[str]) -> Listing:
    """The files that the inputs stand for: paths, `file://` and `s3://` URLs, each of a file, a folder or a pattern.

    Raises PhalanxError for an input that stands for none, and what listing a bucket raises.
    """
    if not inputs or "" in inputs:
        raise PhalanxError(
            "INPUT", value="" if inputs else None, expected="a file, folder, pattern or s3:// URL", remedy="name one"
        )
    found = [_objects(each) if each.startswith(S3) else _local_files(each) for each in inputs]
    root = _common_folder([each.folder for each in found])
    files = {file.path: file.num_bytes for each in found for file in each.files}
    left_out = sum((each.left_out for each in found), Counter[str]())
    skipped = len(location_of(root, ""))
    relative = tuple(InputFile(path[skipped:], num_bytes) for path, num_bytes in files.items())
    searched = tuple(each.searched for each in found if each.searched is not None)
    return Listing(root, relative, dict(sorted(left_out.items())), searched)


def _local_files(given: str) -> _Found:
    try:
        return _below(given, _local_path(given))
    except PermissionError as error:
        raise PhalanxError(
            given, expected="a path this user may look at", remedy="change the permissions of the folders above it"
        ) from error


def _below(given: str, path: Path) -> _Found:
    left_out = Counter[str]()
    if path.is_file():
        return _Found(str(path.parent), [InputFile(str(path), path.stat().st_size)], left_out)
    if path.is_dir():
        found = _choose(given, str(path), walk(str(path), left_out), left_out)
        return replace(found, searched=Searched(str(path)))
    if is_pattern(str(path)):
        folder, pattern = split_pattern(str(path))
        glob = Glob(pattern)
        if Path(folder or "/").is_dir():
            files = walk(folder or "/", left_out, glob.may_hold, sees_hidden=glob.sees_hidden)
            found = _choose(given, folder or "/", files, left_out, glob)
            return replace(found, searched=Searched(folder or "/", pattern))
    if path.exists():
        raise PhalanxError(
            given, expected="a file or a folder", remedy="it is a pipe, a socket or a device: write its text to a file"
        )
    raise _nothing(given, {})


def _local_path(given: str) -> Path:
    """The absolute path that is meant; links that the user chose stay as they are."""
    if "://" in given:
        store = open_store(given)
        if not isinstance(store, FileStore):
            raise PhalanxError(given, expected="a path, file:// or s3:// URL", remedy="name one of these")
        return store.root
    return Path(os.path.abspath(Path(given).expanduser()))  # noqa: PTH100 - resolve() would follow links


def _objects(given: str) -> _Found:
    bucket, key = split_url(given)
    key = key.strip("/")
    store, left_out = open_store(bucket), Counter[str]()
    if key and not given.endswith("/"):
        try:
            num_bytes = store.info(key).num_bytes
        except ObjectMissing:
            pass
        else:
            url = location_of(bucket, key)
            return _Found(url.rpartition("/")[0], [InputFile(url, num_bytes)], left_out)
    folder, pattern = split_pattern(key) if is_pattern(key) else (key, "")
    prefix = f"{folder}/" if folder else ""
    files = (InputFile(each.key.removeprefix(prefix), each.num_bytes) for each in store.list(prefix))
    files = (file for file in files if file.num_bytes or Path(file.path).suffix)  # tools put empty marks for folders
    url = location_of(bucket, prefix).rstrip("/")
    found = _choose(given, url, files, left_out, Glob(pattern) if pattern else None)
    return replace(found, searched=Searched(url, pattern))


def _choose(
    given: str, folder: str, files: Iterable[InputFile], left_out: Counter[str], glob: Glob | None = None
) -> _Found:
    """Those of a folder's files that the input stands for, sorted by relative path; counts the others by suffix."""
    takes_all = glob is not None and glob.names_suffix
    chosen = []
    for file in files:
        if not (glob.matches(file.path) if glob else "/." not in f"/{file.path}"):
            continue
        if takes_all or format_of(file.path).is_known:
            chosen.append(file)
        else:
            left_out[Path(file.path).suffix.lower() or "no suffix"] += 1
    if not chosen:
        raise _nothing(given, left_out)
    chosen.sort(key=lambda file: file.path)
    return _Found(folder, [InputFile(location_of(folder, file.path), file.num_bytes) for file in chosen], left_out)


def _nothing(given: str, left_out: Mapping[str, int]) -> PhalanxError:
    if not left_out and Path(given).is_dir():
        return PhalanxError(given, expected=f"files that we read ({_KNOWN})", remedy="it holds none: check the path")
    if not left_out:
        return PhalanxError(
            given, expected="a file, folder, pattern or s3:// URL", remedy="nothing is there: check the path"
        )
    others = ", ".join(f"{count} {suffix}" for suffix, count in sorted(left_out.items()))
    return PhalanxError(
        given,
        expected=f"files that we read ({_KNOWN})",
        remedy=f"it holds none, only {others}: check the path, or name files with a pattern such as '*.dat'",
    )


def _common_folder(folders: Sequence[str]) -> str:
    """The deepest folder or prefix that holds all of them; "" where they share no disk or bucket."""
    if len({split_url(folder)[0] if folder.startswith(S3) else "" for folder in folders}) > 1:
        return ""
    parts = [folder.split("/") for folder in folders]
    shared = [each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))]
    return "/".join(shared) or "/"
