"""Hugging Face datasets: arrow files (of `save_to_disk`, of its cache) and parquet, with a column of lists of ids; all
that needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from phalanx.core.errors import PhalanxError
from phalanx.data.importing.errors import BadTokens, malformed
from phalanx.data.importing.files import Files
from phalanx.data.importing.options import TOKEN_COLUMNS, Understanding
from phalanx.data.importing.rows import BLOCK_TOKENS, Rows, groups_of
from phalanx.data.importing.tables import ArrowPiece, ParquetPiece
from phalanx.data.prepare.inputs.pieces import PIECE_BYTES

_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_ROWS_AT_ONCE = 1024
_BROKEN = (pa.ArrowException, OSError, ValueError)  # what pyarrow raises for bytes that it can't make sense of


def arrow_piece(files: Files, path: str, stream: int, how: Understanding) -> ArrowPiece:
    """The piece of an arrow file; raises BadTokens for one that is cut or none, PhalanxError for columns."""
    where, num_bytes = files.shown(path), files.existing_size(path)
    source = files.open(path, num_bytes)
    is_file = source.range(0, min(num_bytes, len(_FILE_MAGIC))) == _FILE_MAGIC
    end = source.range(max(num_bytes - 8, 0), num_bytes)
    if not (end.endswith(_FILE_MAGIC) if is_file else end == _STREAM_END):
        raise malformed(where, "a whole arrow file", "it ends early or is none")
    try:
        schema = _reader(files.seekable(path, num_bytes), is_file=is_file).schema
        column, id_column = _columns(where, schema, how)
    except _BROKEN as error:
        raise malformed(where, "an arrow file", f"it is none ({error})") from error
    return ArrowPiece(path, num_bytes, stream, column, id_column)


def parquet_pieces(files: Files, path: str, stream: int, how: Understanding) -> list[ParquetPiece]:
    """The pieces of a parquet file: runs of row groups. Raises BadTokens for one that is cut or none, PhalanxError for
    columns.
    """
    where, num_bytes = files.shown(path), files.existing_size(path)
    try:
        about = pq.ParquetFile(files.seekable(path, num_bytes))
        groups = [about.metadata.row_group(number) for number in range(about.metadata.num_row_groups)]
        column, id_column = _columns(where, about.schema_arrow, how)
    except _BROKEN as error:
        raise malformed(where, "a parquet file", f"it is cut or none ({error})") from error
    rows = np.array([group.num_rows for group in groups], np.int64)
    sizes = np.array([max(group.total_byte_size, 1) for group in groups], np.int64)
    firsts = np.concatenate([[0], np.cumsum(rows)])
    return [
        ParquetPiece(
            path=path,
            num_bytes=int(sizes[first:stop].sum()),
            stream=stream,
            file_bytes=num_bytes,
            column=column,
            id=id_column,
            first=first,
            stop=stop,
            first_row=int(firsts[first]),
        )
        for first, stop in groups_of(sizes, PIECE_BYTES)
    ]


def arrow_rows(files: Files, piece: ArrowPiece) -> Iterator[Rows]:
    """The rows of an arrow file, in order. Raises BadTokens where it is cut or none, or a row or an id is null."""
    where, first_row = files.shown(piece.path), 0
    try:
        for batch in _batches(files.seekable(piece.path, piece.num_bytes)):
            yield from _rows(where, piece.path, first_row, batch, piece.column, piece.id)
            first_row += batch.num_rows
    except _BROKEN as error:
        raise malformed(where, "a whole arrow file", f"it ends early or is none ({error})") from error


def parquet_rows(files: Files, piece: ParquetPiece) -> Iterator[Rows]:
    """The rows of a piece of a parquet file, in order. Raises as `arrow_rows`."""
    where, first_row = files.shown(piece.path), piece.first_row
    columns = [piece.column, piece.id] if piece.id else [piece.column]
    try:
        file = pq.ParquetFile(files.seekable(piece.path, piece.file_bytes), page_checksum_verification=True)
        groups = list(range(piece.first, piece.stop))
        for batch in file.iter_batches(_ROWS_AT_ONCE, groups, columns, use_threads=False):
            yield from _rows(where, piece.path, first_row, batch, piece.column, piece.id)
            first_row += batch.num_rows
    except _BROKEN as error:
        raise malformed(where, "a whole parquet file", f"it does not open ({error})") from error


def _reader(stream: BinaryIO, *, is_file: bool) -> Any:
    source = pa.PythonFile(stream, mode="r")
    return pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)


def _batches(stream: BinaryIO) -> Iterator[Any]:
    is_file = stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    stream.seek(0)
    reader = _reader(stream, is_file=is_file)
    if is_file:
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from reader


def _columns(where: str, schema: Any, how: Understanding) -> tuple[str, str]:
    """Names of the column of ids and of the column that names rows ("": none)."""
    able = [name for name in schema.names if _is_ids(schema.field(name).type)]
    known = [name for name in TOKEN_COLUMNS if name in able]
    chosen = how.column if how.column is not None else (known or able or [""])[0]
    columns = ", ".join(f"{name} ({schema.field(name).type})" for name in schema.names)
    if chosen not in able or (how.column is None and not known and len(able) > 1):
        raise PhalanxError(
            where,
            value=how.column,
            expected="one column of lists of integers",
            remedy=f"name it with --column; it has {columns}",
        )
    if how.id_column is not None and not _is_name(schema, how.id_column):
        raise PhalanxError(
            where,
            value=how.id_column,
            expected="a column of strings or integers for --id-column",
            remedy=f"it has {columns}",
        )
    return chosen, how.id_column or ""


def _is_ids(found: Any) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(matches(found) for matches in lists) and pa.types.is_integer(found.value_type)


def _is_name(schema: Any, name: str) -> bool:
    if name not in schema.names:
        return False
    found = schema.field(name).type
    return any(test(found) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer))


def _rows(where: str, path: str, first_row: int, batch: Any, column: str, id_column: str) -> Iterator[Rows]:
    """The rows of a record batch, in blocks."""
    lists = batch.column(column)
    lists.validate(full=True)  # offsets of a damaged file would be followed anywhere
    names = _names(where, first_row, batch, id_column)
    lengths = _lengths(where, first_row, lists)
    for start, stop in groups_of(lengths, BLOCK_TOKENS):
        values = lists.slice(start, stop - start).flatten()
        if values.null_count:
            missing = pc.index(pc.is_null(values), True).as_py()
            row = first_row + start + int(np.searchsorted(np.cumsum(lengths[start:stop]), missing, side="right"))
            raise BadTokens(f"{where}, row {row}", expected="ids without a null", remedy="mend the row")
        tokens = values.to_numpy(zero_copy_only=False)
        ids = None if names is None else tuple(names[start:stop])
        yield Rows(path, first_row + start, tokens, lengths[start:stop], tokens.nbytes, ids=ids)


def _lengths(where: str, first_row: int, lists: Any) -> Any:
    if lists.null_count:
        row = first_row + pc.index(pc.is_null(lists), True).as_py()
        raise BadTokens(f"{where}, row {row}", expected="a list of ids, it is null", remedy="mend or drop the row")
    if pa.types.is_fixed_size_list(lists.type):
        return np.full(len(lists), lists.type.list_size, np.int64)
    return pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)


def _names(where: str, first_row: int, batch: Any, id_column: str) -> Sequence[str] | None:
    if not id_column:
        return None
    column = batch.column(id_column)
    column.validate(full=True)
    names = column.to_pylist()
    if None in names:
        raise BadTokens(
            f"{where}, row {first_row + names.index(None)}",
            expected="an id, it is null",
            remedy="mend it, or leave out --id-column",
        )
    return [str(name) for name in names]
