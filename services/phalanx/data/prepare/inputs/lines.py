"""JSON lines: one record a line, read by ranges of bytes so that every line belongs to exactly one range.

A line belongs to the range that holds its first byte. A range that begins inside the file therefore looks one byte
back: only where that byte ends a line does a line begin at the range's first byte. Lines end at LF alone (a CR before
it is white space to JSON). Blank lines are counted as lines and give no document; a line that is no JSON, or no object
with a string in the text field, is a document without text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from phalanx.data.prepare.inputs.documents import Fields, RawDocument, parse_record
from phalanx.data.prepare.inputs.pieces import Span


def read_lines(stream: BinaryIO, start: int, stop: int | None) -> Iterator[bytes]:
    """The lines whose first byte lies in [start, stop) (None: to the end), each with its line end.

    stream: positioned at the byte before `start`, or at 0.
    """
    position = start
    if start:
        position += len(stream.readline()) - 1
    while stop is None or position < stop:
        line = stream.readline()
        if not line:
            return
        yield line
        position += len(line)


def line_document(line: bytes, number: int, span: Span, fields: Fields) -> RawDocument | None:
    """The document of a line, the `number`-th of its range from 1; None where the line is blank.

    Without an id of its own it is called by its line: in the file, or, where its range begins later, in the range.
    """
    if not line.strip():
        return None
    place, counted = (span.path, number) if span.start else (f"{span.path}:{number}", None)
    record = parse_record(line)
    if isinstance(record, str):
        return RawDocument(place, None, len(line), counted, problem=record)
    return fields.document(record, place, len(line), counted)
