"""Reads the keys of a config.json of Hugging Face, whose values may be anything, and notes all that is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.errors import PhalanxError

COPY: Final = "copy the config.json that belongs to the weights"
CANNOT: Final = "the decoder can't load this model"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a key's value must be, in words, and whether one is."""

    expected: str
    accepts: Callable[[Any], bool]


# bool is an int of Python's; JSON as Python reads it has NaN and infinity.
WHOLE: Final = Kind("a whole number above 0", lambda value: type(value) is int and 0 < value < 1 << 31)
COUNT: Final = Kind("a whole number", lambda value: type(value) is int and 0 <= value < 1 << 31)
NUMBER: Final = Kind("a number above 0", lambda value: type(value) in (int, float) and 0 < value <= sys.float_info.max)
FLAG: Final = Kind("true or false", lambda value: type(value) is bool)
TABLE: Final = Kind("a table of keys", lambda value: isinstance(value, dict))
LIST: Final = Kind("a list", lambda value: isinstance(value, list))
FACTOR: Final = Kind(
    "a number of at least 1", lambda value: type(value) in (int, float) and 1 <= value <= sys.float_info.max
)
KINDS: Final = {
    "rms_norm_eps": NUMBER,
    "tie_word_embeddings": FLAG,
    "factor": FACTOR,
    "original_max_position_embeddings": WHOLE,
}


class Keys:
    """Reads the keys of a config.json, and notes what is wrong with each."""

    def __init__(self, where: str, config: object) -> None:
        if not isinstance(config, Mapping):
            raise PhalanxError(where, value=type(config).__name__, expected="a JSON object", remedy=COPY)
        self._where, self.config = where, config
        self.problems: list[PhalanxError] = []

    def value(self, key: str, default: object = None) -> object:
        """What stands at `key`; `default` where nothing or null does."""
        found = self.config.get(key)
        return default if found is None else found

    def of(self, kind: Kind, key: str, default: object = None) -> Any:
        """The value at `key`, which is of that kind; None, and a problem noted, where it is not."""
        return self.checked(kind, key, self.value(key, default))

    def checked(self, kind: Kind, key: str, value: object) -> Any:
        """`value`, which is of that kind; None, and a problem noted, where it is not."""
        if kind.accepts(value):
            return value
        self.refuse(key, value, kind.expected, COPY)
        return None

    def refuse(self, key: str, value: object, expected: str, remedy: str) -> None:
        """Notes a problem."""
        self.problems.append(PhalanxError(f"{self._where} {key}", value=value, expected=expected, remedy=remedy))
