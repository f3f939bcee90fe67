"""Where a job's raw values come from: a TOML file, and `--set section.key=value` over it."""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.spec.names import key_at

MAX_NESTING = 100
_TOO_DEEP = f"it has more than {MAX_NESTING} levels of brackets or of dots; remove some"
_REMEDY = "write `--set section.key=value`, for example `--set training.steps=100`"


def read_toml(path: str | Path) -> dict[str, Any]:
    """The raw tables of the file; a byte-order mark at its start is passed over.

    Raises PhalanxError (one line) when it is missing, no regular file (a pipe may never end), unreadable, no UTF-8,
    no TOML or nested more than `MAX_NESTING` deep.
    """
    where = str(path)
    try:
        _refuse_irregular(Path(path))
        text = Path(path).read_bytes().decode().removeprefix("\ufeff")
        raw = tomllib.loads(text)
    except FileNotFoundError:
        raise PhalanxError(
            where, expected="a job file", remedy="no such file; check the path, or start from one in examples/"
        ) from None
    except IsADirectoryError:
        raise PhalanxError(
            where, expected="a job file, not a directory", remedy="name the TOML file inside it"
        ) from None
    except OSError as error:
        raise PhalanxError(
            where, expected="a readable job file", remedy=f"{error.strerror}; check its permissions"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise PhalanxError(
            where, expected="UTF-8 text", remedy=f"byte {error.start} (line {line}) is not; save the file as UTF-8"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise PhalanxError(where, expected="TOML", remedy=f"{_located(str(error), text)}; correct that line") from None
    except RecursionError:
        raise PhalanxError(where, expected="the tables of a job", remedy=_TOO_DEEP) from None
    if _is_too_deep(raw):
        raise PhalanxError(where, expected="the tables of a job", remedy=_TOO_DEEP)
    return raw


def _refuse_irregular(path: Path) -> None:
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise PhalanxError(
            str(path),
            expected="a job file, not a pipe or device",
            remedy="save it as a file and name that",
        )


def _is_too_deep(raw: Any) -> bool:
    """Whether tables and lists lie in each other more than `MAX_NESTING` deep; without recursion."""
    level = [raw]
    for _ in range(MAX_NESTING):
        level = [below for value in level for below in _children(value)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in inner if isinstance(each, dict | list)]


def _located(message: str, text: str) -> str:
    """The parser's message on one line, always with a line and a column."""
    lines = text.split("\n")
    return message.replace("at end of document", f"at line {len(lines)}, column {len(lines[-1]) + 1}").replace(
        "\n", "\\n"
    )


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`raw` with each `section.key=value` set, later ones winning. A value is read as TOML and, where it is none, taken
    as text.

    Raises PhalanxError where an override is not of that form; unknown keys are left for the check of the whole file.
    """
    merged = deepcopy(raw)
    for override in overrides:
        path, text = _split(override)
        table = merged
        for index, part in enumerate(path[:-1]):
            below = table.setdefault(part, {})
            if not isinstance(below, dict):
                where = ".".join(path[: index + 1])
                raise PhalanxError(
                    f"--set {override}", expected=f"a key; {where} is a value, not a table", remedy=_REMEDY
                )
            table = below
        table[path[-1]] = _value(".".join(path), text)
        if _is_too_deep(merged):
            raise PhalanxError("--set", expected="the tables of a job", remedy=_TOO_DEEP)
    return merged


def _split(override: str) -> tuple[list[str], str]:
    name, equals, text = override.partition("=")
    try:
        nested: Any = tomllib.loads(f"{name} = 0") if equals and "\n" not in name else None
    except tomllib.TOMLDecodeError:
        nested = None
    path = []
    while isinstance(nested, dict) and len(nested) == 1:
        part, nested = next(iter(nested.items()))
        path.append(part)
    if len(path) < 2:
        raise PhalanxError("--set", value=override, expected="section.key=value", remedy=_REMEDY)
    return path, text.strip()


def _value(name: str, text: str) -> Any:
    try:
        tables = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError:
        raise PhalanxError(f"--set {name}", expected="a value of a job", remedy=_TOO_DEEP) from None
    value = tables["value"] if set(tables) == {"value"} else text
    known = key_at(name)
    takes_text = known is not None and known.is_text
    return text if takes_text and not isinstance(value, str | dict | list) else value
