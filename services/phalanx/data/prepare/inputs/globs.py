"""Patterns of paths as a shell reads them: `*`, `?`, `[...]` inside a part, `**` for any number of parts.

Wildcards match no leading dot, so hidden files are found only by a pattern that spells the dot. A pattern that matches
a folder stands for everything below it.
"""

from __future__ import annotations

import re

_WILD = re.compile(r"[*?\[]")
_ANY_PARTS = r"(?:(?!\.)[^/]+/)*"


def is_pattern(path: str) -> bool:
    """Whether `path` holds a wildcard."""
    return bool(_WILD.search(path))


def split_pattern(path: str) -> tuple[str, str]:
    """The folder before the first part with a wildcard, and the pattern below it."""
    parts = path.split("/")
    first = next(number for number, part in enumerate(parts) if is_pattern(part))
    return "/".join(parts[:first]), "/".join(parts[first:])


class Glob:
    """One pattern, for paths relative to its folder."""

    def __init__(self, pattern: str) -> None:
        self._parts = [part for part in pattern.split("/") if part]
        self._matcher = re.compile(f"{_joined(self._parts)}(?P<below>/.*)?", re.DOTALL)
        fixed = self._parts[: self._parts.index("**")] if "**" in self._parts else self._parts
        self._fixed = [re.compile(_part(part), re.DOTALL) for part in fixed]

    @property
    def names_suffix(self) -> bool:
        """Whether it ends in a suffix that it spells out, as `*.dat` does."""
        tail = re.split(r"[*?\]]", self._parts[-1])[-1]
        return "." in tail

    @property
    def sees_hidden(self) -> bool:
        """Whether it spells a leading dot."""
        return any(part.startswith(".") for part in self._parts)

    def matches(self, path: str) -> bool:
        """Whether the file at `path`, or a folder that it lies in, is meant."""
        found = self._matcher.fullmatch(path)
        return found is not None and "/." not in (found["below"] or "")

    def may_hold(self, folder: str) -> bool:
        """Whether the folder may hold files that are meant."""
        return all(fixed.fullmatch(part) for fixed, part in zip(self._fixed, folder.split("/"), strict=False))


def _joined(parts: list[str]) -> str:
    """A regular expression for the parts in a row."""
    body = "".join(_ANY_PARTS if part == "**" else _part(part) + "/" for part in parts[:-1])
    return body + (_ANY_PARTS + r"(?!\.)[^/]+" if parts[-1] == "**" else _part(parts[-1]))


def _part(part: str) -> str:
    """A regular expression for one part."""
    found = [r"(?!\.)" if is_pattern(part[0]) else ""]
    position = 0
    while position < len(part):
        close = part.find("]", position + 2) if part[position] == "[" else -1
        if close > 0:
            inner = part[position + 1 : close].replace("\\", r"\\").replace("[", r"\[")
            found.append(f"(?!/)[{'^' + inner[1:] if inner[0] in '!^' else inner}]")
            position = close
        else:
            found.append({"*": "[^/]*", "?": "[^/]"}.get(part[position], re.escape(part[position])))
        position += 1
    return "".join(found)
