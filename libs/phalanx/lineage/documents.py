"""Small objects that services write beside a job's lineage: one flat JSON object with a `format`, read strictly.

What was read, written again, must give the very bytes that were read; anything else is a DamagedObject.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from phalanx.core.digest import canonical_json
from phalanx.lineage.errors import DamagedObject

Document = TypeVar("Document")
FORMAT: Final = 1


def encode_document(value: Any) -> bytes:
    """The bytes that store a frozen dataclass of plain values."""
    return canonical_json({"format": FORMAT, **asdict(value)})


def decode_document(kind: type[Document], key: str, data: bytes) -> Document:
    """The value stored at `key`; raises DamagedObject for anything but what `encode_document` wrote."""
    try:
        fields = _FIELDS.validate_json(data)
        found_format = fields.pop("format", None)
        if found_format != FORMAT:
            raise DamagedObject(key, f"has the format {found_format!r}; this version reads {FORMAT}")
        adapter: TypeAdapter[Document] = _adapter(kind)  # type: ignore[arg-type]  # a class can be hashed
        value = adapter.validate_json(canonical_json(fields), strict=True)
        written = encode_document(value)
    except (ValidationError, ValueError) as error:
        raise DamagedObject(key, f"is not what Phalanx writes there: {_first_line(error)}") from error
    if written != data:
        raise DamagedObject(key, "is not in its one byte form (unknown fields or other spacing)")
    return value


_FIELDS: Final = TypeAdapter(dict[str, Any])


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _first_line(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error)
