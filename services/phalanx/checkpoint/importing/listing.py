"""Many names in one line, for people: the first few, and how many more. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

MOST_LISTED: Final = 3
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER: Final = re.compile(r"(layers\.\d+\.).+")


def listed(names: Sequence[str]) -> str:
    """`a, b, c and 24 more`."""
    more = len(names) - MOST_LISTED
    return ", ".join(names[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def pattern_of(name: str) -> str:
    """The name with its numbers of layers and experts as stars: `layers.*.attention.wq.weight`."""
    return _NUMBER.sub("*", name)


def titled(names: Sequence[str]) -> str:
    """A name, or the pattern of several, how many they are, and the first few."""
    if len(names) == 1:
        return names[0]
    return f"{pattern_of(names[0])} ({len(names)} of them: {listed(names)})"


def lacking(parts_of: Mapping[str, Sequence[str]], all_parts: Sequence[str], names: Iterable[str]) -> list[str]:
    """What lacks, in few words: a layer that has nothing as `layers.3.*`, a parameter that has nothing by its name, of
    others each part by itself.

    parts_of: of parameters that lack something, what. all_parts: what each should have. names: all parameters.
    """
    prefixes: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        prefixes.setdefault(match[1] if match else name, []).append(name)
    told: list[str] = []
    for prefix, members in prefixes.items():
        if len(members) > 1 and all(len(parts_of.get(name, ())) == len(all_parts) for name in members):
            told.append(f"{prefix}*")
            continue
        for name in members:
            parts = parts_of.get(name, ())
            told += [name] if len(parts) == len(all_parts) else [f"{name} {part}" for part in parts]
    return told
