"""A document as found in the input, and the fields in which records keep its text and its id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.core.errors import PhalanxError

BROKEN = "broken_records"
NO_TEXT = "records_without_text"
INVALID_UTF8 = "invalid_utf8"

_MISSING = object()


@dataclass(frozen=True, slots=True)
class RawDocument:
    """A document as found.

    id: its own, or the path of its file where `line` is given: then the document's id is `<path>:<line>`, and `line`
    counts from 1 at the start of the piece, which began somewhere inside the file; see `full_id`.
    text: bytes that should be UTF-8, or a string; None where there is none, and `problem` says why (the name of a
    count). num_bytes: of the text as found, or of the whole record in a JSON-lines file.
    lacks_id: an id field was asked for and this record has none.
    """

    id: str
    text: bytes | str | None
    num_bytes: int
    line: int | None = None
    problem: str = NO_TEXT
    lacks_id: bool = False

    def full_id(self, lines_before: int = 0) -> str:
        """The document's id; lines_before: lines of its file that lie before the piece it was read from."""
        return self.id if self.line is None else f"{self.id}:{lines_before + self.line}"


@dataclass(frozen=True, slots=True)
class Fields:
    """Where records (JSON objects, rows of a parquet file) keep text and id.

    A name is that of a field, else, where it holds dots, a path of names into nested records. id: None means `id` where
    there is one; a name given by the user is missed, and counted, where a record lacks it.
    """

    text: str = "text"
    id: str | None = None

    def check(self) -> None:
        """Raises PhalanxError for an empty name."""
        for option, name in (("--text-field", self.text), ("--id-field", self.id)):
            if name is not None and not all(name.split(".")):
                raise PhalanxError(
                    option,
                    value=name,
                    expected="the name of a field, or names with dots between them",
                    remedy="name it",
                )

    @property
    def id_name(self) -> str:
        """The field that ids are looked for in."""
        return "id" if self.id is None else self.id

    def document(
        self, record: Mapping[str, object], place: str, num_bytes: int, line: int | None = None
    ) -> RawDocument:
        """The document of a record, by its own id (a string or an integer), else by its place (see RawDocument)."""
        found, text = as_id(field(record, self.id_name)), field(record, self.text)
        return RawDocument(
            id=place if found is None else found,
            text=text if isinstance(text, str) else None,
            num_bytes=num_bytes,
            line=line if found is None else None,
            lacks_id=found is None and self.id is not None,
        )


DEFAULT_FIELDS = Fields()


def as_id(value: object) -> str | None:
    """A string or an integer as an id; None for anything else, which is no id."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def field(record: Mapping[str, object], name: str) -> object:
    """The value of a field by its name, else by its path of names; None where there is none."""
    value = record.get(name, _MISSING)
    if value is not _MISSING:
        return value
    inner: object = record
    for part in name.split("."):
        if not isinstance(inner, Mapping):
            return None
        inner = inner.get(part)
    return inner


def parse_record(data: bytes) -> Mapping[str, object] | str:
    """A JSON object from bytes (a byte-order mark is passed over), or the name of the count of what is wrong."""
    try:
        record = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return INVALID_UTF8
    except (ValueError, RecursionError):
        return BROKEN
    return record if isinstance(record, dict) else NO_TEXT
