"""Documents of a parquet file: one a row, read by row groups so that each belongs to exactly one range of bytes.

Ranges are cut without looking into the file. Its row groups are laid over its bytes in proportion to their unpacked
sizes, and each belongs to the range in which it then begins; a range in which none begins gives nothing. (Where a group
really begins stands beside statistics at which pyarrow ends the process, if they are damaged.)

Of a row group only the columns of text and id are read, a few rows at a time: in memory are about 2 MiB of rows and the
page at hand, as large as its writer made it. A row's id is its id column's, else `<path>:<row>`, counted from 1 in the
whole file. A null is a document without text; bytes that are not UTF-8 follow the rule for such text; a file without
the text column is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, repeat
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
    with _reported(location, _footer(span)):
        file = pq.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
        schema = file.schema_arrow
    text, own_id = column_of(schema, fields.text), column_of(schema, fields.id_name)
    if text is None or not text.is_text:
        raise _no_text(schema, text, location, fields)
    for group in _groups(file.metadata, span, location):
        row = group.rows_before
        with _reported(location, group.place):
            for found, value in _rows(file, group, text, own_id):
                row += 1
                yield RawDocument(
                    id=f"{span.path}:{row}" if found is None else found,
                    text="" if value == b"" else value,
                    num_bytes=len(value or b""),
                    lacks_id=found is None and fields.id is not None,
                )
        if row != group.rows_before + group.num_rows:  # pyarrow ends without an error at some damaged pages
            found = f"but {row - group.rows_before} of its rows are there"
            raise CorruptInput(location, group.place, expected="a whole parquet file", found=found)


@dataclass(frozen=True, slots=True)
class _Group:
    """A row group by its number, with the rows before it and in it, and its unpacked size."""

    number: int
    rows_before: int
    num_rows: int
    num_bytes: int

    @property
    def place(self) -> str:
        """As an error names it."""
        return f"row group {self.number} ({self.num_rows} rows behind row {self.rows_before})"

    @property
    def batch_rows(self) -> int:
        """How many rows to take at a time, so that they have about _BATCH_BYTES."""
        return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES * self.num_rows // max(self.num_bytes, 1)))


def _rows(file: Any, group: _Group, text: Column, own_id: Column | None) -> Iterator[tuple[str | None, bytes | None]]:
    """Own ids and texts of a row group's rows."""
    names = [text.name, own_id.name] if own_id else [text.name]
    for batch in file.iter_batches(group.batch_rows, row_groups=[group.number], columns=names, use_threads=False):
        yield from zip(own_id.ids(batch) if own_id else repeat(None, len(batch)), text.bytes_of(batch), strict=True)


def _groups(metadata: Any, span: Span, location: str) -> Iterator[_Group]:
    """The row groups that belong to the span.

    No checksum guards a footer: the rows that it states twice are compared, so that a damaged one doesn't hide any.
    """
    found = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    num_rows = [int(group.num_rows) for group in found]
    if sum(num_rows) != metadata.num_rows or min(num_rows, default=0) < 0:
        footer = f"but its footer names {metadata.num_rows} rows in all, and {sum(num_rows)} in its row groups"
        raise CorruptInput(location, _footer(span), expected="a whole parquet file", found=footer)
    sizes = [max(int(group.total_byte_size), 0) for group in found]
    total = max(sum(sizes), 1)
    rows_before, bytes_before = accumulate(num_rows, initial=0), accumulate(sizes, initial=0)
    for number, (rows, size, row, byte) in enumerate(zip(num_rows, sizes, rows_before, bytes_before, strict=False)):
        if span.start <= (span.num_bytes - 1) * byte // total < span.stop:
            yield _Group(number, row, rows, size)


def _footer(span: Span) -> int:
    """Where the length of the footer stands."""
    return max(span.num_bytes - _FOOTER_BYTES, 0)


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
def _reported(location: str, place: int | str) -> Iterator[None]:
    """Turns pyarrow's errors into CorruptInput; what the file system or memory did passes through."""
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        found = f"but its bytes there are damaged ({str(error).strip().partition(chr(10))[0]})"
        raise CorruptInput(location, place, expected="a whole parquet file", found=found) from error
