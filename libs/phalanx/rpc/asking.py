"""Requests out of what a caller gave: what no message can hold is the caller's mistake, told by the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.core.errors import PhalanxError

Request = TypeVar("Request")
_MOST_SHOWN = 100


def asked(kind: Callable[..., Request], **fields: Any) -> Request:
    """A request with these fields. Raises PhalanxError, naming the field, for a value of another type, a number beyond
    the field's range or text that is not valid Unicode.
    """
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        for name, value in fields.items():
            problem = _problem(kind, name, value)
            if problem is not None:
                raise problem from error
        raise


def _problem(kind: Callable[..., Any], name: str, value: Any) -> PhalanxError | None:
    try:
        kind(**{name: value})
    except (TypeError, ValueError) as error:
        is_number = isinstance(value, int) or (
            isinstance(value, list | tuple) and all(isinstance(v, int) for v in value)
        )
        expected = "a smaller number" if is_number and isinstance(error, ValueError) else f"another type ({error})"
        if isinstance(error, UnicodeError):
            expected = "valid Unicode text"
        return PhalanxError(
            name.replace("_", " "), value=ascii(value)[:_MOST_SHOWN], expected=expected, remedy="correct the value"
        )
    return None
