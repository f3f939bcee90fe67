"""What every key of the job file carries: one mark, a sentence, a unit, a type and a default; and the walk over all of
them.

The marks decide what a change means. Identity: another value is another training run. Journaled: the first value
belongs to the identity, later ones are journal entries. Placement: where and how wide the run is laid out, may differ
at every start. Free: anything else.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUndefined

from phalanx.core.numbering import LARGEST as LARGEST_IN_KEYS

# The most of each unit: far beyond any run, and small enough that products and keys in storage (8 digits) hold them.
MOST: Mapping[str, int] = {
    "attempts": LARGEST_IN_KEYS,
    "checkpoints": LARGEST_IN_KEYS,
    "elements": 1 << 24,
    "epochs": 1_000_000,
    "experts": 1 << 20,
    "GiB": 1 << 30,
    "groups": 1 << 20,
    "heads": 1 << 20,
    "layers": 1 << 20,
    "nodes": 1 << 20,
    "parts": 1 << 30,
    "ranks": 1 << 20,
    "seconds": 100_000_000,
    "shards": 1 << 30,
    "stages": 1 << 10,
    "steps": LARGEST_IN_KEYS,
    "tokens": (1 << 31) - 1,
    "windows": 1 << 24,
}
LARGEST_INTEGER = (1 << 63) - 1

# The forms that phalanx.objects opens; whether the place exists is not looked at here.
URL_PATTERN = r"^(file://(/|\./|~/)|s3://[^/]+|memory://)"


class Mark(StrEnum):
    """What a change of a key means for a run that exists."""

    IDENTITY = "identity"
    JOURNALED = "journaled"
    PLACEMENT = "placement"
    FREE = "free"


def wrong(expected: str, remedy: str) -> PydanticCustomError:
    """An error of a validator that already knows what was expected and what to do."""
    return PydanticCustomError("phalanx", "expected {expected}; {remedy}", {"expected": expected, "remedy": remedy})


class Section(BaseModel):
    """One table of the job file: frozen, strict about types, closed to unknown keys. Built at first use, which keeps
    imports fast."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @field_validator("*")
    @classmethod
    def _no_null_characters(cls, value: Any) -> Any:
        if isinstance(value, str) and "\0" in value:
            raise wrong("text without null characters, which no path or name can have", "remove them")
        return value


def key(
    mark: Mark,
    description: str,
    default: Any = ...,
    *,
    unit: str = "",
    shown: str = "",
    shapes: bool = False,
    **rules: Any,
) -> Any:
    """A field of a section. unit: in words, empty for a pure number or a name; it bounds the value by `MOST`. shown:
    the default in words where it is computed."""
    if unit in MOST and not {"le", "lt"} & rules.keys() and {"ge", "gt"} & rules.keys():
        rules["le"] = MOST[unit]
    extra: JsonDict = {"mark": mark.value, "unit": unit, "shown": shown, "shapes": shapes}
    return Field(default, description=description, json_schema_extra=extra, **rules)


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One documented key. name: dotted, as a user writes it. default: TOML text, empty when the key must be given."""

    name: str
    mark: str
    type_text: str
    default: str
    unit: str
    description: str
    is_text: bool
    changes_shapes: bool

    @property
    def section(self) -> str:
        """Dotted name of the table that holds the key."""
        return self.name.rpartition(".")[0]


def child_section(field: FieldInfo) -> tuple[type[Section], bool] | None:
    """The section type inside a field's annotation and whether it is a table of named ones (`[storage.NAME]`); None for
    a plain key."""
    annotation = field.annotation
    if get_origin(annotation) is dict:
        value = get_args(annotation)[1]
        return (value, True) if isinstance(value, type) and issubclass(value, Section) else None
    for part in _union_members(annotation):
        if isinstance(part, type) and issubclass(part, Section):
            return part, False
    return None


def walk_fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every plain key below `section` as (dotted name, field), in the order of definition."""
    for attribute, field in section.model_fields.items():
        name = f"{prefix}{field.alias or attribute}"
        child = child_section(field)
        if child is None:
            yield name, field
        else:
            yield from walk_fields(child[0], f"{name}.NAME." if child[1] else f"{name}.")


def walk_sections(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every table below `section` as (dotted name, type), each before the tables inside it."""
    for attribute, field in section.model_fields.items():
        child = child_section(field)
        if child is not None:
            name = f"{prefix}{field.alias or attribute}" + (".NAME" if child[1] else "")
            yield name, child[0]
            yield from walk_sections(child[0], f"{name}.")


def describe(name: str, field: FieldInfo) -> KeyInfo:
    """The documentation of one key out of its field; missing parts come out empty (a test refuses them)."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    members = [part for part in _union_members(field.annotation) if part is not type(None)]
    return KeyInfo(
        name=name,
        mark=str(extra.get("mark", "")),
        type_text=_type_text(members, field),
        default=str(extra.get("shown") or "") or _default_text(field.default),
        unit=str(extra.get("unit", "")),
        description=field.description or "",
        is_text=members == [str],
        changes_shapes=bool(extra.get("shapes")),
    )


def mark_of(field: FieldInfo) -> Mark:
    """The mark of a key. Raises KeyError where it has none (a test walks all keys)."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return Mark(str(extra["mark"]))


def _union_members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _union_members(part)]
    return [annotation]


def _default_text(default: Any) -> str:
    if default is PydanticUndefined:
        return ""
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f'"{default}"' if isinstance(default, str) else repr(default)


_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
BY_NAME = "numbers by name"
OWN_BY_NAME = {Any: "values by name", str: "texts by name"}
_NAMES = {int: "integer", float: "number", bool: "true or false", str: "text"}


def bound_text(bound: float) -> str:
    """A bound as users read it."""
    return f"{int(bound):,}" if float(bound).is_integer() else f"{bound:g}"


def _type_text(members: list[Any], field: FieldInfo) -> str:
    texts = []
    for member in members:
        if get_origin(member) is Literal:
            texts += [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in get_args(member)]
        elif get_origin(member) is dict:
            texts.append(OWN_BY_NAME.get(_union_members(get_args(member)[1])[0], BY_NAME))
        else:
            texts.append(_NAMES.get(member, "table"))
    bounds = [
        f"{sign} {bound_text(getattr(rule, name))}"
        for rule in field.metadata
        for name, sign in _SIGNS.items()
        if hasattr(rule, name)
    ]
    return " ".join([" or ".join(texts), *([", ".join(bounds)] if bounds else [])])
