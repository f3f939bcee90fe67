"""The name of a checkpoint as torch's callers give it: a step."""

from __future__ import annotations

import os

from phalanx.core.numbering import numbered
from phalanx.snapshot.arguments import step_of


def step_named(checkpoint_id: str | int | os.PathLike[str]) -> int:
    """The step that a `checkpoint_id` names, which torch's callers give as text: its digits; PhalanxError for anything
    else.
    """
    text = str(checkpoint_id)
    number = None if isinstance(checkpoint_id, bool | int) else numbered(text.lstrip("0") or text[:1])
    return step_of(checkpoint_id if number is None else number)
