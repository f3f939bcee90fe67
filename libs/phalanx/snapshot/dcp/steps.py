"""The name of a checkpoint as torch's callers give it: a step."""

from __future__ import annotations

import os

from phalanx.core.errors import PhalanxError

_MOST_DIGITS = 8  # of a number in a key


def step_of(value: int | str | os.PathLike[str]) -> int:
    """`value` (a whole number, or its digits as text) as a step; PhalanxError for anything else."""
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or len(text.lstrip("0")) > _MOST_DIGITS:
        raise PhalanxError(
            "step",
            value=value,
            expected="a whole number of up to 8 digits",
            remedy="count optimizer steps; the place of the checkpoints is the url",
        )
    return int(text)
