"""Tables as TOML text, for showing a job file; reading it back gives the same tables (None, which TOML lacks, is left
out)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def toml_text(tables: Mapping[str, Any]) -> str:
    """TOML for nested mappings of texts, numbers, booleans and lists."""
    return "\n".join(_lines(tables, ())).strip() + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    values = {name: value for name, value in table.items() if value is not None and not isinstance(value, Mapping)}
    if path and (values or not table):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for name, value in values.items():
        yield f"{_key(name)} = {_value(value)}"
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*path, name))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
