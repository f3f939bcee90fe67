"""A source of tokens: files below a root, understood as one format and cut into pieces that are read alone.

Pieces follow from the files' sizes, indices and headers, never from workers or parts. Pieces with one `stream` number
lie end to end: the shards of an MDS dataset, the files of a saved Hugging Face dataset, the parts of any other file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, takewhile
from pathlib import PurePosixPath
from typing import Protocol

from phalanx.core.errors import PhalanxError
from phalanx.data.importing.errors import BadTokens, require_pyarrow
from phalanx.data.importing.files import Files, rooted
from phalanx.data.importing.flat import FlatPiece, npy_pieces, raw_pieces
from phalanx.data.importing.mds import INDEX, MdsPiece, is_mds_index, mds_pieces
from phalanx.data.importing.megatron import MegatronPiece, megatron_pieces
from phalanx.data.importing.options import Boundaries, Format, Understanding
from phalanx.data.importing.rows import Rows, checked
from phalanx.data.importing.saved import STATE, refuse_splits, saved_paths
from phalanx.data.importing.tables import ArrowPiece, ParquetPiece

_SUFFIXES = {".npy": Format.NPY, ".parquet": Format.PARQUET, ".arrow": Format.ARROW, ".idx": Format.MEGATRON}
_KNOWN = "an MDS folder, Megatron .bin/.idx, a saved Hugging Face dataset, .arrow, .parquet, .npy, or raw .bin"


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

    Raises PhalanxError where an input stands for nothing, for several formats, is cut or contradicts itself, or holds
    no token.
    """
    how.check()
    files, paths = rooted(inputs)
    found = [each for path in paths for each in _inputs(files, path, how)]
    formats = sorted({each.value for each, _ in found})
    if len(formats) > 1:
        raise PhalanxError(
            files.shown(""), expected="files of one format", remedy=f"they are {' and '.join(formats)}: name --format"
        )
    chosen = found[0][0]
    boundaries = how.boundaries or (Boundaries.EOS if chosen is Format.RAW else Boundaries.ROWS)
    if chosen is Format.RAW and boundaries is Boundaries.ROWS:
        raise PhalanxError("--boundaries", value="rows", expected="eos", remedy="a raw file has no rows")
    looked_at = files.each(lambda each: _pieces(files, chosen, each[1][1], each[0], boundaries, how), enumerate(found))
    pieces = [piece for each in looked_at for piece in each]
    if not pieces:
        raise BadTokens(files.shown(paths[0]), expected="tokens", remedy="it is empty: name another input")
    return TokenSource(files.root, chosen, boundaries, tuple(pieces)), files


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


def _inputs(files: Files, path: str, how: Understanding) -> list[tuple[Format, str]]:
    """What one named input stands for: files or folders with their formats, each a stream, in order."""
    if path and files.size(path) is not None:
        return [(how.format or _format_of_file(files, path), path)]
    if files.is_folder(path):
        return _folder(files, path, how)
    if path and files.size(f"{path}.idx") is not None:
        return [(Format.MEGATRON, path)]
    raise PhalanxError(files.shown(path), expected=_KNOWN, remedy="nothing is there: check the path")


def _folder(files: Files, folder: str, how: Understanding) -> list[tuple[Format, str]]:
    prefix = f"{folder}/" if folder else ""
    index_bytes = files.size(f"{prefix}{INDEX}")
    if how.format is Format.MDS or (
        index_bytes is not None and is_mds_index(files.open(f"{prefix}{INDEX}", index_bytes).whole())
    ):
        return [(Format.MDS, folder)]
    refuse_splits(files, folder)
    if how.format in (None, Format.ARROW) and files.size(f"{prefix}{STATE}") is not None:
        return [(Format.ARROW, folder)]
    below = files.below(folder)
    suffixes = {PurePosixPath(path).suffix for path in below}
    if how.format is Format.RAW:
        return [(Format.RAW, path) for path in _with_suffix(files, folder, below, ".bin")]
    if how.format is not None:
        wanted = next(suffix for suffix, each in _SUFFIXES.items() if each is how.format)
        return [(how.format, path) for path in _with_suffix(files, folder, below, wanted)]
    known = [suffix for suffix in _SUFFIXES if suffix in suffixes]
    if ".bin" in suffixes and Format.MEGATRON not in [_SUFFIXES[suffix] for suffix in known]:
        return [(Format.RAW, path) for path in _with_suffix(files, folder, below, ".bin")]
    if not known:
        raise PhalanxError(files.shown(folder), expected=_KNOWN, remedy="it holds none: check the path")
    return [(_SUFFIXES[suffix], path) for suffix in known for path in _with_suffix(files, folder, below, suffix)]


def _with_suffix(files: Files, folder: str, below: Sequence[str], suffix: str) -> list[str]:
    found = [path for path in below if path.endswith(suffix)]
    if not found:
        raise PhalanxError(files.shown(folder), expected=f"files ending in {suffix}", remedy="it holds none")
    return found


def _format_of_file(files: Files, path: str) -> Format:
    suffix = PurePosixPath(path).suffix
    if suffix == ".bin":
        return Format.MEGATRON if files.size(f"{path.removesuffix('.bin')}.idx") is not None else Format.RAW
    if suffix not in _SUFFIXES:
        raise PhalanxError(files.shown(path), expected=_KNOWN, remedy="its name does not say which: name --format")
    return _SUFFIXES[suffix]
