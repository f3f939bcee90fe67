"""One piece of the input as a stream of documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from phalanx.data.prepare.inputs.documents import Fields, RawDocument
from phalanx.data.prepare.inputs.formats import Kind
from phalanx.data.prepare.inputs.lines import line_document, read_lines
from phalanx.data.prepare.inputs.opening import opened
from phalanx.data.prepare.inputs.pieces import Piece, Span


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
            yield from self._documents(span, stream)

    def _documents(self, span: Span, stream: BinaryIO) -> Iterator[RawDocument]:
        match span.format.kind:
            case Kind.JSON_LINES:
                yield from self._lines(span, stream)
            case _:
                data = stream.read()
                yield RawDocument(span.path, data, len(data))

    def _lines(self, span: Span, stream: BinaryIO) -> Iterator[RawDocument]:
        stop = None if span.is_whole else span.stop
        for number, line in enumerate(read_lines(stream, span.start, stop), start=1):
            self.num_lines = number if self._piece.part_of else 0
            document = line_document(line, number, span, self._fields)
            if document is not None:
                yield document
