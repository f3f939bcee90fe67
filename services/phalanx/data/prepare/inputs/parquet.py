"""Documents of a parquet file: one a row, read by row groups so that each belongs to exactly one range of bytes.

A row group belongs to the range that holds its first byte, so ranges can be cut without looking into the file, and one
without a row group gives nothing. Of a row group only the columns of text and id are read, a few rows at a time: in
memory are about 2 MiB of text and the page at hand, as large as its writer made it. A row's id is its id column's,
else `<path>:<row>`, counted from 1 in the whole file. A null is a document without text; bytes that are not UTF-8
follow the rule for such text; a file without the text column is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.inputs.columns import Column, column_of
from phalanx.data.prepare.inputs.documents import Fields, RawDocument
from phalanx.data.prepare.inputs.errors import CorruptInput
from phalanx.data.prepare.inputs.pieces import Span

_BUFFER_BYTES = 4 * 2**20
_BATCH_BYTES = 2 * 2**20
_MAX_BATCH_ROWS = 1024
_FOOTER_BYTES = 8


def parquet_documents(stream: BinaryIO, span: Span, location: str, fields: Fields) -> Iterator[RawDocument]:
    """The documents of the row groups that begin in the span, in order.

    Raises CorruptInput, and PhalanxError where there is no text column.
    """
    with _reported(location, max(span.num_bytes - _FOOTER_BYTES, 0)):
        file = pq.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
        schema = file.schema_arrow
    text, own_id = column_of(schema, fields.text), column_of(schema, fields.id_name)
    if text is None or not text.is_text:
        raise _no_text(schema, text, location, fields)
    for number, rows_before in _groups(file.metadata, span, text, location):
        group, row = file.metadata.row_group(number), rows_before
        with _reported(location, _start(group)):
            for found, value in _rows(file, number, text, own_id):
                row += 1
                yield RawDocument(
                    id=f"{span.path}:{row}" if found is None else found,
                    text="" if value == b"" else value,
                    num_bytes=len(value or b""),
                    lacks_id=found is None and fields.id is not None,
                )
        if row != rows_before + group.num_rows:  # pyarrow ends without an error at some damaged pages
            found = f"but it has {row - rows_before} of the {group.num_rows} rows of row group {number}"
            raise CorruptInput(location, _start(group), expected="a whole parquet file", found=found)


def _rows(file: Any, group: int, text: Column, own_id: Column | None) -> Iterator[tuple[str | None, bytes | None]]:
    """Own ids and texts of a row group's rows."""
    names = [text.name, own_id.name] if own_id else [text.name]
    batch_rows = _batch_rows(file.metadata.row_group(group), text.name)
    for batch in file.iter_batches(batch_rows, row_groups=[group], columns=names, use_threads=False):
        yield from zip(own_id.ids(batch) if own_id else repeat(None, len(batch)), text.bytes_of(batch), strict=True)


def _groups(metadata: Any, span: Span, text: Column, location: str) -> Iterator[tuple[int, int]]:
    """The row groups that begin in the span, each with the number of rows before it.

    No checksum guards a footer: what it says twice is compared, so that a damaged one doesn't hide rows.
    """
    row = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        start = _start(group)
        if not 0 <= start < span.num_bytes:
            raise _contradiction(location, span, f"puts row group {number} at byte {start}")
        if sum(column.num_values for column in _columns(group, text.name)) != group.num_rows:
            raise _contradiction(location, span, f"names two numbers of rows for row group {number}")
        if span.start <= start < span.stop:
            yield number, row
        row += group.num_rows
    if row != metadata.num_rows:
        raise _contradiction(location, span, f"says {metadata.num_rows} rows, and {row} in its row groups")


def _contradiction(location: str, span: Span, found: str) -> CorruptInput:
    offset = max(span.num_bytes - _FOOTER_BYTES, 0)
    return CorruptInput(location, offset, expected="a whole parquet file", found=f"but its footer {found}")


def _columns(group: Any, name: str) -> list[Any]:
    """What the footer says of a column in a row group."""
    columns = (group.column(number) for number in range(group.num_columns))
    return [column for column in columns if column.path_in_schema == name]


def _start(group: Any) -> int:
    """The byte at which a row group begins."""
    first = group.column(0)
    offsets = [first.data_page_offset, first.dictionary_page_offset if first.has_dictionary_page else None]
    return int(min(offset for offset in offsets if offset is not None))


def _batch_rows(group: Any, name: str) -> int:
    """How many rows to take at a time, so that they have about _BATCH_BYTES of text."""
    num_bytes = sum(column.total_uncompressed_size for column in _columns(group, name))
    return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES * int(group.num_rows) // max(int(num_bytes), 1)))


def _no_text(schema: Any, found: Column | None, location: str, fields: Fields) -> PhalanxError:
    if found is not None:
        return PhalanxError(
            location,
            expected=f"text in the column {fields.text!r}, found {found.type}",
            remedy="name another --text-field",
        )
    return PhalanxError(
        location,
        expected=f"a column {fields.text!r}, found {', '.join(schema.names) or 'none'}",
        remedy="name the column of the text with --text-field",
    )


@contextmanager
def _reported(location: str, offset: int) -> Iterator[None]:
    """Turns pyarrow's errors into CorruptInput; what the file system or memory did passes through."""
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        found = f"but its bytes there are none ({str(error).strip().partition(chr(10))[0]})"
        raise CorruptInput(location, offset, expected="a whole parquet file", found=found) from error
