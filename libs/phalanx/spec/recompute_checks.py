"""Rules of recompute: what it can't be combined with. Pure; values only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.spec.finding import Finding
from phalanx.spec.layout import Layout
from phalanx.spec.parallel import ZERO_BUBBLE_SCHEDULES

if TYPE_CHECKING:
    from phalanx.spec.job import Job

_MODE = "activation_checkpoint.mode"


def recompute_findings(job: Job, layout: Layout | None) -> Iterator[Finding]:
    """What selective recompute can't do. A size of pp that is still open (-1) is passed over."""
    if job.activation_checkpoint.mode != "selective":
        return
    pp, schedule = layout.pp if layout else max(job.parallel.pp, 1), job.parallel.schedule
    if job.compile.enable:
        yield Finding(
            (_MODE, "compile.enable"),
            "selective",
            "none or full with compile.enable: a compiler itself chooses what cheap operations it does again",
            'set it to "none", or compile.enable = false',
        )
    if pp > 1 and schedule in ZERO_BUBBLE_SCHEDULES:
        yield Finding(
            (_MODE, "parallel.schedule", "parallel.pp"),
            "selective",
            f"none or full with the schedule {schedule}, whose backward runs in two parts: torch 2.13 gives what "
            "selective recompute kept to the first of them only",
            'set it to "full", or choose interleaved_1f1b',
        )
