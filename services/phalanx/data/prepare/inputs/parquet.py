"""Documents of a parquet file: one a row, read by row groups so that each belongs to exactly one range of bytes.

A row group belongs to the range that holds its first byte, so ranges can be cut without looking into the file, and one
without a row group gives nothing. Of a row group only the columns of text and id are read, a few rows at a time. A
row's id is its id column's, else `<path>:<row>`, counted from 1 in the whole file. A null is a document without text;
bytes that are not UTF-8 follow the rule for such text; a file without the text column is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.inputs.columns import Column, column_of
from phalanx.data.prepare.inputs.documents import Fields, RawDocument
from phalanx.data.prepare.inputs.errors import CorruptInput
from phalanx.data.prepare.inputs.pieces import Span

_BUFFER_BYTES = 4 * 2**20
_BATCH_BYTES = 8 * 2**20
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
    for group, first_row in _groups(file.metadata, span, location):
        with _reported(location, _start(file.metadata.row_group(group))):
            yield from _rows(file, group, first_row, text, own_id, span.path, fields)


def _rows(
    file: Any, group: int, row: int, text: Column, own_id: Column | None, path: str, fields: Fields
) -> Iterator[RawDocument]:
    columns = [text.name, own_id.name] if own_id else [text.name]
    num_rows = _batch_rows(file.metadata.row_group(group), text.name)
    for batch in file.iter_batches(num_rows, row_groups=[group], columns=columns, use_threads=False):
        ids = own_id.ids(batch) if own_id else [None] * len(batch)
        for value, found in zip(text.bytes_of(batch), ids, strict=True):
            row += 1
            yield RawDocument(
                id=f"{path}:{row}" if found is None else found,
                text="" if value == b"" else value,
                num_bytes=len(value or b""),
                lacks_id=found is None and fields.id is not None,
            )


def _groups(metadata: Any, span: Span, location: str) -> Iterator[tuple[int, int]]:
    """The row groups that begin in the span, each with the number of rows before it."""
    row = 0
    for group in range(metadata.num_row_groups):
        start = _start(metadata.row_group(group))
        if not 0 <= start < span.num_bytes:
            raise CorruptInput(
                location,
                max(span.num_bytes - _FOOTER_BYTES, 0),
                expected="a whole parquet file",
                found=f"but its footer puts the row group {group} at byte {start}",
            )
        if span.start <= start < span.stop:
            yield group, row
        row += metadata.row_group(group).num_rows


def _start(group: Any) -> int:
    """The byte at which a row group begins."""
    first = group.column(0)
    offsets = [first.data_page_offset, first.dictionary_page_offset if first.has_dictionary_page else None]
    return int(min(offset for offset in offsets if offset is not None))


def _batch_rows(group: Any, name: str) -> int:
    """How many rows to take at a time, so that they have about _BATCH_BYTES of text."""
    columns = (group.column(number) for number in range(group.num_columns))
    num_bytes = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == name)
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
