"""Pieces of tables with a column of lists of ids: arrow files and runs of row groups of parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from phalanx.data.importing.files import Files
from phalanx.data.importing.rows import Rows


@dataclass(frozen=True, slots=True)
class ArrowPiece:
    """One arrow file, a stream or a file of record batches. id: a column's name, "" where rows have no id."""

    kind: ClassVar[str] = "arrow"
    path: str
    num_bytes: int
    stream: int
    column: str
    id: str

    def rows(self, files: Files, *, is_head: bool) -> Iterator[Rows]:
        """All rows, in order."""
        from phalanx.data.importing.columns import arrow_rows

        return arrow_rows(files, self)


@dataclass(frozen=True, slots=True)
class ParquetPiece:
    """The row groups [first, stop) of a parquet file, whose first row is `first_row`. num_bytes: of these groups."""

    kind: ClassVar[str] = "parquet"
    path: str
    num_bytes: int
    stream: int
    file_bytes: int
    column: str
    id: str
    first: int
    stop: int
    first_row: int

    def rows(self, files: Files, *, is_head: bool) -> Iterator[Rows]:
        """All rows, in order."""
        from phalanx.data.importing.columns import parquet_rows

        return parquet_rows(files, self)
