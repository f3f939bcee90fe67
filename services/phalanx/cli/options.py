"""Refusals in a user's words: a service or its client names the field of a message, a user gave an option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from phalanx.core.errors import PhalanxError, Problems


@dataclass(frozen=True, slots=True)
class Option:
    """What a user wrote: the option's or the argument's name, and its value."""

    name: str
    value: object


@contextmanager
def named_as_given(fields: Mapping[str, Option]) -> Iterator[None]:
    """Raises a PhalanxError of one of those fields (`offset`, say) again under the option that the field was made from,
    with the value that stood there. Every other error passes as it is.
    """
    try:
        yield
    except Problems:
        raise
    except PhalanxError as error:
        option = fields.get(error.where)
        if option is None:
            raise
        raise PhalanxError(option.name, value=option.value, expected=error.expected, remedy=error.remedy) from error
