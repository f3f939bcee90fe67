"""A source of documents: files below one root, listed once, read piece by piece in any process.

`source_of` lists what the user named; `Source.pieces()` cuts the listing; `Source.read(piece)` gives its documents.
A document's id is its own (a record's id field), else the file's path relative to the root (`/` between its parts),
with `:<line>`, `:<row>` or `:<key>` behind it where the file holds many. Ids are free text: dots and slashes mean
nothing in them (they are never names inside a tar). What is not valid Unicode in one stays in it as lone surrogates;
`rules` escapes them.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.inputs import TEXT_SUFFIXES, Fields, InputFile, Piece, RawDocument, cut, piece_bytes_for
from phalanx.data.prepare.inputs.apart import Searched
from phalanx.data.prepare.inputs.documents import DEFAULT_FIELDS
from phalanx.data.prepare.inputs.listing import list_inputs
from phalanx.data.prepare.inputs.reading import Reading

__all__ = ["TEXT_SUFFIXES", "Fields", "Piece", "RawDocument", "Reading", "Source", "python_stdlib_corpus", "source_of"]

_STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "ensurepip"}
)


@dataclass(frozen=True, slots=True)
class Source:
    """Files below `root` (an absolute folder or an s3:// URL; "" where the inputs share none), in reading order.

    fields: where records keep text and id. left_out: how many files the listing did not take, by suffix.
    searched: the folders that the listing looked into; no part of what another process needs.
    """

    root: str
    files: tuple[InputFile, ...]
    fields: Fields = DEFAULT_FIELDS
    left_out: Mapping[str, int] = field(default_factory=dict)
    searched: tuple[Searched, ...] = field(default=(), compare=False)

    @property
    def num_bytes(self) -> int:
        """Size of all files, as they lie there (compressed ones compressed)."""
        return sum(file.num_bytes for file in self.files)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files' paths below the root."""
        return tuple(file.path for file in self.files)

    def pieces(self) -> Sequence[Piece]:
        """The input cut into pieces: a function of names and sizes alone."""
        return tuple(cut(self.files, piece_bytes_for(self.files)))

    def read(self, piece: Piece) -> Reading:
        """The documents of a piece, in order; iterate over it once. The listing is not needed for it.

        While iterating it raises CorruptInput and ChangedInput (PhalanxErrors that name the file), and OutsideError.
        """
        return Reading(self.root, self.fields, piece)

    def documents(self) -> Iterator[RawDocument]:
        """Every document, by its full id."""
        lines_before: dict[str, int] = {}
        for piece in self.pieces():
            before = lines_before.get(piece.part_of or "", 0)
            reading = self.read(piece)
            for document in reading:
                yield replace(document, id=document.full_id(before), line=None)
            if piece.part_of:
                lines_before = {piece.part_of: before + reading.num_lines}

    def without_listing(self) -> Source:
        """The same source without its files: all that another process needs to `read` pieces, in a few bytes."""
        return replace(self, files=(), searched=())

    def to_json(self) -> str:
        """ASCII that `from_json` turns back into this source."""
        files = [[file.path, file.num_bytes] for file in self.files]
        return json.dumps({"root": self.root, "files": files, "fields": asdict(self.fields), "left_out": self.left_out})

    @staticmethod
    def from_json(text: str) -> Source:
        """The source that `to_json` gave."""
        found = json.loads(text)
        files = tuple(InputFile(*file) for file in found["files"])
        return Source(found["root"], files, Fields(**found["fields"]), found["left_out"])


def source_of(inputs: str | Path | Sequence[str | Path], fields: Fields = DEFAULT_FIELDS) -> Source:
    """The source that one or more inputs stand for: files, folders, patterns (`corpus/**/*.jsonl.gz`), s3:// URLs.

    See `inputs.listing` for what is taken and in which order. Raises PhalanxError where an input stands for nothing
    that we read, or a field's name is empty.
    """
    fields.check()
    given = [inputs] if isinstance(inputs, str | Path) else inputs
    listing = list_inputs([str(each) for each in given])
    return Source(listing.root, listing.files, fields, listing.left_out, listing.searched)


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
    return _files(root, names, DEFAULT_FIELDS)


def _python_files(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_LEFT_OUT]
        relative = Path(folder).relative_to(root)
        yield from ((relative / name).as_posix() for name in files if name.endswith(".py"))


def _files(root: Path, names: Sequence[str], fields: Fields) -> Source:
    return Source(str(root), tuple(InputFile(name, (root / name).stat().st_size) for name in names), fields)
