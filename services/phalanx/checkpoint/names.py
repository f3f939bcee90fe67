"""Names of checkpoints on the wire, `<job>/checkpoints/a<A>-s<step>`, and what selects one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.core.numbering import MOST_DIGITS, numbered
from phalanx.lineage import CheckpointRef
from phalanx.lineage.registry import JobName

_REF = re.compile(r"a([0-9]+)-s([0-9]+)")
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Selector:
    """Which checkpoint is meant: that of a step, one by attempt and step, or the newest live one (both None)."""

    step: int | None = None
    ref: CheckpointRef | None = None

    def __str__(self) -> str:
        if self.ref is not None:
            return ref_text(self.ref)
        return LATEST if self.step is None else str(self.step)


def parse_selector(text: str, where: str = "selector") -> Selector:
    """What `latest`, a step or `a<A>-s<step>` selects; PhalanxError for any other text."""
    if text == LATEST:
        return Selector()
    match = _REF.fullmatch(text)
    attempt, step = (numbered(match[1]), numbered(match[2])) if match else (None, numbered(text))
    if step is None or (match and not attempt):
        expected = f"`latest`, a step, or a<attempt>-s<step>, each number of up to {MOST_DIGITS} digits"
        raise PhalanxError(where, value=text, expected=expected, remedy="list the checkpoints")
    return Selector(step=step) if attempt is None else Selector(ref=CheckpointRef(attempt, step))


def ref_text(ref: CheckpointRef) -> str:
    """`a<A>-s<step>`."""
    return f"a{ref.attempt}-s{ref.step}"


def checkpoint_name(job: JobName, ref: CheckpointRef) -> str:
    """The name of a checkpoint on the wire."""
    return f"{job}/checkpoints/{ref_text(ref)}"
