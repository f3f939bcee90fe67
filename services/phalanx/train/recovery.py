"""From a cause to its remedy, and how often: pure.

A user's error is never retried. Attempts in a row that began and brought no new checkpoint use the budget up; one that
never began does not count, but each such start waits longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from phalanx.gang import Budget
from phalanx.lineage.events import Cause


class Remedy(StrEnum):
    """What is done about the end of an attempt."""

    IN_PLACE = "restart in place"
    OTHER_NODE = "restart on another node, where there is one"
    ROLL_BACK = "roll back and leave windows out, as the job's policy asks"
    GIVE_UP = "give up"


REMEDIES: Final[Mapping[str, Remedy]] = {
    "process_death": Remedy.IN_PLACE,
    "error": Remedy.IN_PLACE,
    "hang": Remedy.OTHER_NODE,
    "out_of_memory": Remedy.IN_PLACE,
    "storage": Remedy.IN_PLACE,
    "lost_peer": Remedy.IN_PLACE,
    "interrupted": Remedy.IN_PLACE,
    "node_loss": Remedy.OTHER_NODE,
    "nan": Remedy.ROLL_BACK,
    "spike": Remedy.ROLL_BACK,
    "divergence": Remedy.ROLL_BACK,
    "bad_shard": Remedy.IN_PLACE,
    "bad_checkpoint": Remedy.IN_PLACE,
    "straggler": Remedy.OTHER_NODE,
    "gpu_fault": Remedy.OTHER_NODE,
    "user_error": Remedy.GIVE_UP,
    "superseded": Remedy.GIVE_UP,
}
LONGEST_BACKOFF_S: Final = 60.0


def remedy_of(cause: Cause) -> Remedy:
    """The remedy for what ended an attempt; a cause that this version does not know is retried in place."""
    return REMEDIES.get(cause.kind, Remedy.IN_PLACE)


def budget_after(spent: int, *, began: bool, progressed: bool) -> int:
    """Attempts in a row without progress, after one more has ended."""
    return Budget(spent=spent).after(committed=progressed).spent if began else spent


def is_exhausted(spent: int, limit: int) -> bool:
    """Whether no further attempt follows."""
    return spent >= Budget(limit).max_attempts_without_progress


def backoff_s(num_failed: int) -> float:
    """How long the next start waits after so many failures in a row: at once after the first."""
    return 0.0 if num_failed <= 1 else min(LONGEST_BACKOFF_S, float(2 ** min(num_failed - 2, 10)))


def remedy_table() -> str:
    """The table of the README."""
    lines = ["| cause | remedy |", "|---|---|"]
    lines += [f"| `{kind}` | {remedy} |" for kind, remedy in REMEDIES.items()]
    return "\n".join(lines) + "\n"
