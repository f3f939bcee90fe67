"""Lines of Prometheus' text format, one by one: pure. A line that is none costs that line alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*')
_ESCAPED = re.compile(r"\\(.)")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|Inf|NaN|inf|nan)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One value. value: as it is written, for a number's form says of what type it was."""

    name: str
    labels: Mapping[str, str]
    value: str


def samples(lines: Iterable[str]) -> Iterator[Sample | None]:
    """The samples; None for a line that is neither one, nor a comment, nor empty."""
    for line in lines:
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield sample(stripped)


def sample(line: str) -> Sample | None:
    """The sample in a line, None where it holds none."""
    match = _NAME.match(line)
    if match is None:
        return None
    name, at, labels = match[0], match.end(), {}
    if line[at : at + 1] == "{":
        at += 1
        while not line[at:].lstrip().startswith("}"):
            label = _LABEL.match(line, at)
            if label is None:
                return None
            labels[label[1]] = _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], label[2])
            at = label.end()
            if line[at : at + 1] == ",":
                at += 1
            elif line[at : at + 1] != "}":
                return None
        at = line.index("}", at) + 1
    rest = line[at:].split()
    if len(rest) not in (1, 2) or _NUMBER.fullmatch(rest[0]) is None:
        return None
    return Sample(name, labels, rest[0])
