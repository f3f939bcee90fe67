"""Values of a state dict that are no tensors, as canonical JSON: numbers, texts, lists, tuples, dicts (format in
docs/formats/checkpoint.md).

What JSON has is written as it is; what it lacks (tuples, dicts as values, infinities, NaN) is a JSON object with one
key that says what it is, so that reading gives the same Python value. Anything else is refused by name: no pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.core.digest import canonical_json
from phalanx.core.errors import PhalanxError, Problems
from phalanx.snapshot.errors import DamagedCheckpoint

FORMAT = "phalanx.values/1"
SUFFIX = "-values.json"
NamePath = tuple[str | int, ...]
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_PLAIN = (type(None), bool, int, str)
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True, slots=True)
class Values:
    """What one rank stored beside its tensors.

    values: by the flat name. paths: where a name (of a value or a tensor) lies in the nested state dict, for names that
    are not at its top: keys of dicts as text, indices of lists as numbers.
    """

    values: Mapping[str, object]
    paths: Mapping[str, NamePath]


def encode(values: Values) -> bytes:
    """The bytes that store `values`. Raises Problems that name every value which JSON cannot hold."""
    plain: dict[str, Json] = {}
    problems: list[PhalanxError] = []
    for name, value in values.values.items():
        try:
            plain[name] = _plain(value)
            canonical_json({name: plain[name]})
        except (TypeError, ValueError, RecursionError) as error:
            problems.append(_refusal(name, value, error))
    if problems:
        raise Problems("state dict", problems)
    paths = {name: list(path) for name, path in values.paths.items()}
    return canonical_json({"format": FORMAT, "values": plain, "paths": paths})


def decode(key: str, data: bytes) -> Values:
    """What `encode` wrote; DamagedCheckpoint, naming the object `key`, for anything else."""
    try:
        found = json.loads(data)
        if not isinstance(found, dict) or found.keys() != {"format", "values", "paths"} or found["format"] != FORMAT:
            raise ValueError(f"it is not of the format {FORMAT}")
        values = {str(name): _value(value) for name, value in found["values"].items()}
        paths = {str(name): _path(path) for name, path in found["paths"].items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(key, f"does not hold values as Phalanx writes them: {error}") from error
    return Values(values, paths)


def _plain(value: object) -> Json:
    """`value` as JSON; TypeError says what of it is none. A subclass is none: it would come back as its base."""
    if type(value) in _PLAIN:
        return value  # type: ignore[return-value]  # exactly one of _PLAIN
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is list:
        return [_plain(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [_plain(item) for item in value]}
    if type(value) is dict:
        if any(type(key) is not str for key in value):
            raise TypeError("a dict whose keys are not all texts")
        return {"dict": {key: _plain(item) for key, item in value.items()}}
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


def _value(plain: Json) -> object:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tuple" and isinstance(content, list):
        return tuple(_value(item) for item in content)
    if kind == "dict" and isinstance(content, dict):
        return {key: _value(item) for key, item in content.items()}
    if kind == "float" and isinstance(content, str):
        return _NON_FINITE[content]
    raise ValueError(f"{kind!r} is no kind of value")


def _path(plain: Json) -> NamePath:
    if not isinstance(plain, list) or not plain:
        raise ValueError(f"{plain!r} is no path")
    return tuple(step if isinstance(step, int) else str(step) for step in plain)


def _refusal(name: str, value: object, error: Exception) -> PhalanxError:
    found = str(error) if isinstance(error, TypeError) else f"{type(value).__name__}: {error}"
    return PhalanxError(
        name,
        value=found,
        expected="a tensor, or None, bool, int, float, str, and lists, tuples and dicts of them",
        remedy="convert it (a tensor or a text can hold most things), or leave it out of the state dict",
    )
