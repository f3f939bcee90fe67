"""Errors that a person reads: what is wrong, where, what was expected, and the remedy, in one line each.

`PhalanxError` and its subclasses mean that a user did something wrong; the CLI prints them and exits 2.
`OutsideError` means that something outside broke (a disk, a server, a peer) and stayed broken until the deadline; the
CLI exits 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MOST_SHOWN = 300


def shortened(text: str) -> str:
    """`text`, or its first characters where nobody would read it all."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"


class _Portable(Exception):
    """An error that a copy of, or another process' view of, says the same; Python would call the class with its text
    alone.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _portable, (type(self), self.args), dict(self.__dict__)


def _portable(kind: type[_Portable], args: tuple[Any, ...]) -> _Portable:
    return kind.__new__(kind, *args)


class PhalanxError(_Portable):
    """A mistake of the user's, told in one line.

    where: the key, path or option that is wrong. value: what stood there (None: not shown).
    expected: what should have stood there. remedy: what to do about it.
    """

    def __init__(self, where: str, *, expected: str, remedy: str, value: object = None) -> None:
        self.where, self.value, self.expected, self.remedy = where, value, expected, remedy
        shown = "" if value is None else f" is {shortened(repr(value))}"
        super().__init__(f"{where}{shown}: expected {expected}; {remedy}")


class Problems(PhalanxError):
    """Several mistakes found at once, one line each."""

    def __init__(self, where: str, problems: Iterable[PhalanxError]) -> None:
        self.problems = tuple(problems)
        assert self.problems, "Problems needs at least one problem"
        first = self.problems[0]
        super().__init__(where, expected=first.expected, remedy=first.remedy, value=first.value)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class OutsideError(_Portable):
    """Something outside Phalanx broke and did not mend within its deadline; the cause is chained."""
