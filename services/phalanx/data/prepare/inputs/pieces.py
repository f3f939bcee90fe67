"""Pieces: parts of the input that are read alone, cut by names and sizes and by nothing else.

Small files go together, in the order of the listing; a large .jsonl or parquet file is cut into byte ranges; what
cannot be cut is a piece of its own. So pieces, and with them everything that is made from pieces one by one, are the
same for any number of workers, parts or machines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from phalanx.data.prepare.inputs.formats import Format, Kind, format_of

PIECE_BYTES = 32 * 2**20
_LEAST_PIECE_BYTES = 2**20
_PIECES_OF_SMALL_INPUTS = 64
_FILE_COST_BYTES = 4096  # opening a file takes time too
_EXPANSION = {"gz": 4, "zst": 4}


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of the input: its path relative to the source's root, with `/` between the parts, and its size."""

    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """What a piece holds of one file, whose size is `num_bytes`: the range [start, stop) of its bytes.

    Of a .jsonl the lines that begin in the range, of a parquet file the row groups that begin in it; else it is the
    whole file.
    """

    path: str
    num_bytes: int
    start: int
    stop: int

    @property
    def format(self) -> Format:
        """The file's format."""
        return format_of(self.path)

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the file."""
        return self.start == 0 and self.stop == self.num_bytes


@dataclass(frozen=True)
class Piece:
    """Whole files in a row, or a range of one file."""

    spans: tuple[Span, ...]

    @cached_property
    def num_bytes(self) -> int:
        """The piece's share of the listed bytes; those of all pieces add up to the source's."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def part_of(self) -> str | None:
        """The path of the .jsonl file that this is a range of, whose lines are counted on from piece to piece.

        None for other pieces: ids of their documents are complete.
        """
        first = self.spans[0]
        return first.path if first.format.kind is Kind.JSON_LINES and not first.is_whole else None

    def to_json(self) -> str:
        """ASCII that `from_json` turns back into this piece, paths that are no Unicode included."""
        return json.dumps([[span.path, span.num_bytes, span.start, span.stop] for span in self.spans])

    @staticmethod
    def from_json(text: str) -> Piece:
        """The piece that `to_json` gave."""
        return Piece(tuple(Span(*fields) for fields in json.loads(text)))


def cut(files: Sequence[InputFile], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """The pieces of a listing, in its order; each has about `piece_bytes` of documents where the files allow it."""
    run: list[Span] = []
    weight = 0
    for file in files:
        cost = _cost(file)
        if run and weight + cost > piece_bytes:
            yield Piece(tuple(run))
            run, weight = [], 0
        if cost > piece_bytes:
            yield from _ranges(file, cost, piece_bytes)
        else:
            run.append(Span(file.path, file.num_bytes, 0, file.num_bytes))
            weight += cost
    if run:
        yield Piece(tuple(run))


def piece_bytes_for(files: Sequence[InputFile]) -> int:
    """How large the pieces of a listing should be: smaller ones of a small input, which so keeps many workers busy to
    its end.
    """
    cost = sum(map(_cost, files))
    return min(PIECE_BYTES, max(_LEAST_PIECE_BYTES, cost // _PIECES_OF_SMALL_INPUTS))


def _cost(file: InputFile) -> int:
    """About how many bytes of documents a file gives."""
    return file.num_bytes * _EXPANSION.get(format_of(file.path).compression, 1) + _FILE_COST_BYTES


def _ranges(file: InputFile, cost: int, piece_bytes: int) -> Iterator[Piece]:
    count = max(1, min(-(-cost // piece_bytes), file.num_bytes)) if format_of(file.path).can_be_split else 1
    bounds = [file.num_bytes * number // count for number in range(count + 1)]
    for start, stop in pairwise(bounds):
        yield Piece((Span(file.path, file.num_bytes, start, stop),))
