"""Where documents come from: folders of text and source files, single files, .jsonl; always in one deterministic order.

A document's id is the file's path relative to the input (`/` between its parts), or for a line of a .jsonl file its
`id`, else `<path>:<line>`, counted from 1. Ids are free text: dots and slashes mean nothing in them (they are never
names inside a tar). What is not valid Unicode in one stays in it as lone surrogates; `rules` escapes them.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import PhalanxError

TEXT_SUFFIXES = frozenset(
    {
        *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".json", ".jsonl"),
        *(".yaml", ".yml", ".toml", ".ini", ".cfg", ".sql", ".proto", ".cmake", ".sh", ".bash"),
        *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".go", ".rs", ".swift"),
        *(".java", ".kt", ".scala", ".js", ".mjs", ".ts", ".tsx", ".jsx", ".css", ".rb", ".php", ".pl", ".lua"),
        *(".r", ".jl", ".hs", ".ml", ".ex", ".erl"),
    }
)
_STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "ensurepip"}
)


@dataclass(frozen=True, slots=True)
class RawDocument:
    """A document as found. text: bytes of a file, or the string of a JSON record; None where the record has no text."""

    id: str
    text: bytes | str | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Source:
    """Files below `root`, by relative path, in the order in which they are read. num_bytes: their total size."""

    root: Path
    paths: tuple[str, ...]
    num_bytes: int

    def documents(self) -> Iterator[RawDocument]:
        """Every document, one file in memory at a time; a .jsonl file one line at a time."""
        for path in self.paths:
            file = self.root / path
            if file.suffix.lower() == ".jsonl":
                yield from _json_lines(file, path)
            else:
                data = file.read_bytes()
                yield RawDocument(path, data, len(data))


def source_of(path: Path, suffixes: frozenset[str] = TEXT_SUFFIXES) -> Source:
    """The source at `path`: one file, or a folder with all files of these suffixes below it, sorted by relative path.

    Hidden files and folders are left out. Raises PhalanxError where nothing is there to read.
    """
    if path.is_file():
        return Source(path.parent, (path.name,), path.stat().st_size)
    if not path.is_dir():
        raise PhalanxError(str(path), expected="a folder or file of text", remedy="nothing is there: check the path")
    found = [file.relative_to(path) for file in path.rglob("*") if file.suffix.lower() in suffixes and file.is_file()]
    names = sorted(file.as_posix() for file in found if not any(part.startswith(".") for part in file.parts))
    if not names:
        raise PhalanxError(
            str(path),
            expected="a folder with text files (.txt, .md, .jsonl, source files)",
            remedy="it holds none: check the path",
        )
    return _files(path, names)


def python_stdlib_corpus(max_bytes: int) -> Source:
    """Sources of the running interpreter's standard library as a corpus that every machine has: sorted by path, at most
    `max_bytes`.

    Tests, installed packages and the old grammar converter with its deliberately broken sources are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names, total = [], 0
    for name in sorted(_python_files(root)):
        size = (root / name).stat().st_size
        if total + size <= max_bytes:
            names.append(name)
            total += size
    if not names:
        raise PhalanxError(
            str(root),
            expected="the standard library's sources",
            remedy="they are not installed: name a folder of text instead",
        )
    return _files(root, names)


def _python_files(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_LEFT_OUT]
        relative = Path(folder).relative_to(root)
        yield from ((relative / name).as_posix() for name in files if name.endswith(".py"))


def _files(root: Path, names: Sequence[str]) -> Source:
    return Source(root, tuple(names), sum((root / name).stat().st_size for name in names))


def _json_lines(file: Path, path: str) -> Iterator[RawDocument]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            yield _json_record(line, f"{path}:{number}")


def _json_record(line: bytes, fallback_id: str) -> RawDocument:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return RawDocument(fallback_id, None, len(line))
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        return RawDocument(fallback_id, None, len(line))
    given = record.get("id")
    return RawDocument(str(given) if isinstance(given, str | int) else fallback_id, record["text"], len(line))
