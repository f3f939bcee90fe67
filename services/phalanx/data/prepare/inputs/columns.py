"""Columns of a parquet file by the names that a user gives: top-level ones, or paths into structs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, slots=True)
class Column:
    """A column and its type; path: its name, or those that lead to it through structs."""

    path: tuple[str, ...]
    type: Any

    @property
    def name(self) -> str:
        """As parquet calls it."""
        return ".".join(self.path)

    @property
    def is_text(self) -> bool:
        """Whether its values are strings or bytes (or it has none at all)."""
        return _is_text(self.type) or pa.types.is_null(self.type)

    def bytes_of(self, batch: Any) -> list[bytes | None]:
        """A text column's values as bytes, which may not be UTF-8."""
        values = self._values(batch)
        if not pa.types.is_null(values.type):
            values = values.cast(pa.large_binary())
        return list(values.to_pylist())

    def ids(self, batch: Any) -> list[str | None]:
        """Strings and integers as ids; None for nulls and for columns of other types."""
        if _is_text(self.type):
            return [None if value is None else value.decode(errors="surrogateescape") for value in self.bytes_of(batch)]
        if pa.types.is_integer(self.type):
            return [None if value is None else str(value) for value in self._values(batch).to_pylist()]
        return [None] * len(batch)

    def _values(self, batch: Any) -> Any:
        values = batch.column(self.path[0])
        if self.path[1:]:
            values = pc.struct_field(values, list(self.path[1:]))
        if isinstance(values.type, pa.BaseExtensionType):
            values = values.storage
        return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def column_of(schema: Any, name: str) -> Column | None:
    """The column of that very name, else at that path; None where there is none, or more than one."""
    path = (name,) if name in schema.names else tuple(name.split("."))
    if schema.names.count(path[0]) != 1:
        return None
    found = schema.field(path[0]).type
    for part in path[1:]:
        if not pa.types.is_struct(found) or found.get_field_index(part) < 0:
            return None
        found = found.field(part).type
    return Column(path, found)


def _is_text(given: Any) -> bool:
    if isinstance(given, pa.BaseExtensionType):
        return _is_text(given.storage_type)
    if pa.types.is_dictionary(given):
        return _is_text(given.value_type)
    strings = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    of_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(matches(given) for matches in strings + of_bytes)
