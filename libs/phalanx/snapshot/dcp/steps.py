"""The name of a checkpoint as torch's callers give it: a step."""

from __future__ import annotations

import os

from phalanx.snapshot.arguments import step_of


def step_named(checkpoint_id: str | int | os.PathLike[str]) -> int:
    """The step that a `checkpoint_id` names, which torch's callers give as text: its digits; PhalanxError for anything
    else.
    """
    text = str(checkpoint_id)
    is_number = not isinstance(checkpoint_id, bool | int) and text.isdecimal()
    return step_of(int(text) if is_number and len(text.lstrip("0")) <= 8 else checkpoint_id)
