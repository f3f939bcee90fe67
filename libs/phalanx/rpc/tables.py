"""Frozen dataclasses from TOML tables and back, with one clear line for whatever is wrong in the file."""

from __future__ import annotations

import json
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from phalanx.core.errors import PhalanxError
from phalanx.rpc.files import read_bytes

Value = TypeVar("Value")
Scalar = str | int | float | bool
NOT_IN_FILE = MappingProxyType({"in_file": False})  # metadata of a field that no file holds


def read_table(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """The tables of a TOML file; raises PhalanxError when it is missing or no TOML."""
    data = read_bytes(path, what, remedy)
    try:
        return tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PhalanxError(str(path), expected=f"TOML ({error})", remedy="correct that line") from None


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a file a value stands, for errors; and the folder that its relative paths start from."""

    file: Path
    keys: tuple[str, ...] = ()

    def at(self, key: str) -> Place:
        """The place of a key in this table."""
        return Place(self.file, (*self.keys, key))

    def __str__(self) -> str:
        return f"{self.file}: {'.'.join(self.keys)}" if self.keys else str(self.file)


def built(kind: type[Value], table: Mapping[str, Any], place: Place) -> Value:
    """The dataclass with the table's values; raises PhalanxError for an unknown or missing key or a wrong type."""
    assert is_dataclass(kind)
    known: dict[str, Field[Any]] = {each.name: each for each in _in_file(kind)}
    for key in table:
        if key not in known:
            raise PhalanxError(str(place.at(key)), expected=f"one of {', '.join(known)}", remedy="remove or correct it")
    hints = get_type_hints(kind)
    values = {key: _value(hints[key], raw, place.at(key)) for key, raw in table.items()}
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise PhalanxError(str(place), expected=f"the key {name}", remedy="add it")
    return kind(**values)


def _value(hint: Any, raw: Any, place: Place) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        choices = [each for each in arguments if each is not type(None)]
        if len(choices) == 1:
            return _value(choices[0], raw, place)
        if type(raw) in choices:
            return raw
        raise _wrong(raw, " or ".join(each.__name__ for each in choices), place)
    if is_dataclass(hint) and isinstance(hint, type):
        return built(hint, _table(raw, place), place)
    if origin is not None and issubclass_of_mapping(origin):
        return {key: _value(arguments[1], each, place.at(key)) for key, each in _table(raw, place).items()}
    if origin is tuple:
        if not isinstance(raw, list):
            raise _wrong(raw, "a list", place)
        return tuple(_value(arguments[0], each, place) for each in raw)
    if origin is Literal:
        if raw not in arguments:
            raise _wrong(raw, " or ".join(map(repr, arguments)), place)
        return raw
    return _scalar(hint, raw, place)


def issubclass_of_mapping(origin: Any) -> bool:
    """Whether a generic type is a mapping."""
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _scalar(hint: Any, raw: Any, place: Place) -> Any:
    if hint is Path and isinstance(raw, str) and raw:
        return (place.file.parent / raw).absolute()
    if hint is float and type(raw) in (int, float):
        return float(raw)
    if hint in (str, int, bool) and type(raw) is hint:
        return raw
    names = {Path: "a path", str: "a text", int: "an integer", float: "a number", bool: "true or false"}
    raise _wrong(raw, names[hint], place)


def _table(raw: Any, place: Place) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise _wrong(raw, "a table", place)
    return raw


def _wrong(raw: Any, expected: str, place: Place) -> PhalanxError:
    return PhalanxError(str(place), value=raw, expected=expected, remedy="correct the value")


def toml(value: Any, folder: Path) -> str:
    """The TOML text from which `built` makes the same dataclass again, in a file of that folder: paths below it are
    written relative to it. None and empty tables are left out.
    """
    return "\n".join(_lines(_plain(value, folder), ())).strip() + "\n"


def _in_file(kind: Any) -> tuple[Field[Any], ...]:
    return tuple(each for each in fields(kind) if each.metadata.get("in_file", True))


def _plain(value: Any, folder: Path) -> Any:
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name), folder) for each in _in_file(value)}
    if isinstance(value, Mapping):
        return {key: _plain(each, folder) for key, each in value.items()}
    if isinstance(value, Path):
        return str(value.relative_to(folder) if value.is_relative_to(folder) else value)
    return [_plain(each, folder) for each in value] if isinstance(value, tuple) else value


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    scalars = {key: each for key, each in table.items() if each is not None and not isinstance(each, dict)}
    if path and scalars:
        yield f"\n[{'.'.join(map(_text, path))}]"
    for key, each in scalars.items():
        yield f"{_text(key)} = {_text(each)}"
    for key, each in table.items():
        if isinstance(each, dict):
            yield from _lines(each, (*path, key))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)
