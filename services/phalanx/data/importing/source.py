"""A source of tokens: files below a root, understood as one format and cut into pieces that are read alone.

Pieces follow from the files' sizes, indices and headers, never from workers or parts. Pieces with one `stream` number
lie end to end: the shards of an MDS dataset, the files of a saved Hugging Face dataset, the parts of any other file.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, takewhile
from pathlib import PurePosixPath
from typing import Protocol

from phalanx.core.errors import PhalanxError
from phalanx.data.importing.errors import BadTokens, require_pyarrow
from phalanx.data.importing.files import Files, rooted
from phalanx.data.importing.flat import FlatPiece, npy_pieces, raw_pieces
from phalanx.data.importing.mds import MdsPiece, mds_pieces
from phalanx.data.importing.megatron import MegatronPiece, megatron_pieces
from phalanx.data.importing.naming import named, one_format
from phalanx.data.importing.options import Boundaries, Format, Understanding
from phalanx.data.importing.rows import Rows, checked
from phalanx.data.importing.saved import saved_paths
from phalanx.data.importing.tables import ArrowPiece, ParquetPiece

LOG = logging.getLogger(__name__)


class Piece(Protocol):
    """A part of the input that is read alone."""

    @property
    def kind(self) -> str:
        """Its class, in JSON."""
        ...

    @property
    def path(self) -> str:
        """Its file, below the root."""
        ...

    @property
    def num_bytes(self) -> int:
        """Its share of the input."""
        ...

    @property
    def stream(self) -> int:
        """Pieces of one stream lie end to end."""
        ...

    def rows(self, files: Files, *, is_head: bool) -> Iterator[Rows]:
        """Its rows in order; is_head: perhaps only the first few are asked for."""
        ...


_PIECES: Mapping[str, Callable[..., Piece]] = {
    kind.kind: kind for kind in (MdsPiece, MegatronPiece, ArrowPiece, ParquetPiece, FlatPiece)
}


@dataclass(frozen=True, slots=True)
class TokenSource:
    """format, boundaries: as they were found or given. root: the folder that all paths lie below."""

    root: str
    format: Format
    boundaries: Boundaries
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return sum(piece.num_bytes for piece in self.pieces)

    def listing(self) -> bytes:
        """ASCII JSON of all that pieces say of the input: equal inputs, equal bytes, wherever they lie."""
        pieces = [[piece.kind, asdict(piece)] for piece in self.pieces]  # type: ignore[call-overload]
        return json.dumps(pieces, sort_keys=True, separators=(",", ":")).encode()

    def rows(self, files: Files, number: int, vocab_size: int, *, is_head: bool = False) -> Iterator[Rows]:
        """Rows of a piece, every id checked, in the type that the dataset stores."""
        piece = self.pieces[number]
        where = files.shown(piece.path)
        return (checked(rows, vocab_size, where) for rows in piece.rows(files, is_head=is_head))

    def following(self, files: Files, number: int, vocab_size: int) -> Iterator[Rows]:
        """Rows of the same stream behind a piece, read as they are asked for."""
        stream = self.pieces[number].stream
        numbers = range(number + 1, len(self.pieces))
        behind = takewhile(lambda other: self.pieces[other].stream == stream, numbers)
        return chain.from_iterable(self.rows(files, other, vocab_size, is_head=True) for other in behind)

    def begins_stream(self, number: int) -> bool:
        """Whether a piece is the first of its stream."""
        return number == 0 or self.pieces[number - 1].stream != self.pieces[number].stream


def token_source(inputs: Sequence[str], how: Understanding) -> tuple[TokenSource, Files]:
    """What the user named, looked at: sizes, indices and headers are checked, tokens are not read.

    A warning counts the files of folders that are left out. Raises PhalanxError where an input stands for nothing, for
    several formats, is cut or contradicts itself, or holds no token, and for choices that its format does not take.
    """
    how.check()
    files, paths = rooted(inputs)
    inputs_found = [named(files, path, how.format) for path in paths]
    found = list(dict.fromkeys(each for one in inputs_found for each in one.streams))
    chosen = one_format(files, found)
    how.check_for(chosen)
    boundaries = how.boundaries or (Boundaries.EOS if chosen is Format.RAW else Boundaries.ROWS)
    if chosen is Format.RAW and boundaries is Boundaries.ROWS:
        raise PhalanxError("--boundaries", value="rows", expected="eos", remedy="a raw file has no rows")
    looked_at = files.each(lambda each: _pieces(files, chosen, each[1][1], each[0], boundaries, how), enumerate(found))
    pieces = [piece for each in looked_at for piece in each]
    if not pieces:
        raise BadTokens(files.shown(paths[0]), expected="tokens", remedy="it is empty: name another input")
    _tell_left_out(files, {path for one in inputs_found for path in one.left_out} - set(paths))
    return TokenSource(files.root, chosen, boundaries, tuple(pieces)), files


def _tell_left_out(files: Files, paths: Iterable[str]) -> None:
    """Counts the files that are no part of the input, so that none is missed unsaid."""
    left_out = Counter(PurePosixPath(path).suffix.lower() or "no suffix" for path in paths)
    if left_out:
        kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(left_out.items()))
        LOG.warning("%s: files left out: %s", files.shown(""), kinds)


def pieces_of(listing: bytes) -> tuple[Piece, ...]:
    """The pieces that `TokenSource.listing` gave."""
    return tuple(_PIECES[kind](**fields) for kind, fields in json.loads(listing))


def _pieces(
    files: Files, chosen: Format, path: str, stream: int, boundaries: Boundaries, how: Understanding
) -> Iterable[Piece]:
    match chosen:
        case Format.MDS:
            return [piece for piece in mds_pieces(files, path, stream, how) if piece.samples]
        case Format.MEGATRON:
            return megatron_pieces(files, path, stream, by_sequence=how.sequences)
        case Format.PARQUET:
            require_pyarrow(files.shown(path))
            from phalanx.data.importing.columns import parquet_pieces

            return parquet_pieces(files, path, stream, how)
        case Format.NPY:
            return npy_pieces(files, path, stream, has_rows=boundaries is Boundaries.ROWS)
        case Format.RAW:
            return raw_pieces(files, path, stream, how.required_dtype(files.shown(path)), how.skip_bytes)
        case Format.ARROW:
            return _arrow_pieces(files, path, stream, how)


def _arrow_pieces(files: Files, path: str, stream: int, how: Understanding) -> list[Piece]:
    """Of one arrow file, or of a folder that `save_to_disk` wrote."""
    require_pyarrow(files.shown(path))
    from phalanx.data.importing.columns import arrow_piece

    paths = [path] if files.size(path) is not None else saved_paths(files, path)
    return [*files.each(lambda each: arrow_piece(files, each, stream, how), paths)]
