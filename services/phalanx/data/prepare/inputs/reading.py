"""One piece of the input as a stream of documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare.inputs.documents import Fields, RawDocument
from phalanx.data.prepare.inputs.formats import Kind
from phalanx.data.prepare.inputs.lines import line_document, read_lines
from phalanx.data.prepare.inputs.opening import location_of, opened
from phalanx.data.prepare.inputs.pieces import Piece, Span
from phalanx.data.prepare.inputs.samples import tar_documents
from phalanx.data.prepare.inputs.unpacking import unpacked


class Reading:
    """Iterate over it once for a piece's documents, in order.

    num_lines: of a range of a .jsonl file (`piece.part_of`), the lines read so far; once the documents are exhausted,
    all that begin in the range, blank ones included. 0 for other pieces.
    """

    def __init__(self, root: str, fields: Fields, piece: Piece) -> None:
        self._root, self._fields, self._piece = root, fields, piece
        self.num_lines = 0

    def __iter__(self) -> Iterator[RawDocument]:
        for span, stream in opened(self._root, self._piece):
            yield from _told(location_of(self._root, span.path), self._documents(span, stream))

    def _documents(self, span: Span, stream: BinaryIO) -> Iterator[RawDocument]:
        location = location_of(self._root, span.path)
        if span.format.kind is Kind.PARQUET:
            yield from _rows(stream, span, location, self._fields)
            return
        plain = unpacked(stream, span.format.compression, location)
        match span.format.kind:
            case Kind.JSON_LINES:
                yield from self._lines(span, plain)
            case Kind.TAR:
                yield from tar_documents(plain, span.path, location, self._fields)
            case _:
                data = plain.read()
                yield RawDocument(span.path, data, len(data))

    def _lines(self, span: Span, stream: BinaryIO) -> Iterator[RawDocument]:
        if not span.num_bytes:
            yield RawDocument(span.path, b"", 0)
        stop = span.stop if self._piece.part_of else None
        for number, line in enumerate(read_lines(stream, span.start, stop), start=1):
            if self._piece.part_of:
                self.num_lines = number
            document = line_document(line, number, span, self._fields)
            if document is not None:
                yield document


def _told(location: str, documents: Iterator[RawDocument]) -> Iterator[RawDocument]:
    """`documents`; raises OutsideError where the disk or network below fails while they are read."""
    try:
        yield from documents
    except OSError as error:
        raise OutsideError(f"{location}: {error.strerror or error}") from error


def _rows(stream: BinaryIO, span: Span, location: str, fields: Fields) -> Iterator[RawDocument]:
    try:
        from phalanx.data.prepare.inputs.parquet import parquet_documents
    except ImportError as error:
        raise PhalanxError(
            location, expected="pyarrow to be installed, which reads parquet", remedy="pip install 'phalanx[data]'"
        ) from error
    return parquet_documents(stream, span, location, fields)
