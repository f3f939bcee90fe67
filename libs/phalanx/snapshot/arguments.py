"""What callers of the package give, looked at before anything is read or written."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

from phalanx.core.errors import PhalanxError
from phalanx.core.numbering import LARGEST, MOST_DIGITS


def step_of(
    value: object,
    where: str = "step",
    remedy: str = "count optimizer steps; the place of the checkpoints is the url",
) -> int:
    """`value`, an int or an integer of numpy's, as a step; PhalanxError for anything else, texts and bools too, which
    calls it `where` and offers `remedy`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) <= LARGEST:
        raise PhalanxError(
            where,
            value=str(value) if value is None else value,
            expected=f"a whole number of up to {MOST_DIGITS} digits",
            remedy=remedy,
        )
    return int(value)


def names_of(where: str, given: Iterable[str]) -> tuple[str, ...]:
    """`given` as names; PhalanxError for one text, which is no list of them, and for what holds other things."""
    remedy = f'write {where}=["model.bias"]'
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        if isinstance(given, str):
            remedy = f'write {where}=["{given}"]'
        raise PhalanxError(where, value=given, expected="a list of names", remedy=remedy)
    names = tuple(given)
    if not all(isinstance(name, str) for name in names):
        raise PhalanxError(where, value=list(names), expected="a list of names, each a text", remedy=remedy)
    return names
