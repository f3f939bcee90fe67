"""Checkpoints that could not be restored, as entries of the journal: no later attempt names one of them as its parent.

Whoever finds the damage says so (a rank through its control, the checkpoint service for it); the first entry is enough.
"""

from __future__ import annotations

from phalanx.lineage.plan import DAMAGED_CHECKPOINT_KIND
from phalanx.lineage.store import Lineage
from phalanx.lineage.values import CheckpointRef, JournalEntry


def report_damage(lineage: Lineage, attempt: int, damaged: CheckpointRef, position: int, why: str) -> JournalEntry:
    """Writes into the journal of `attempt` that `damaged` can't be restored; said twice it is one entry.

    position: the window at which the checkpoint stands, 0 where its manifest can't tell.
    """
    payload = {"attempt": damaged.attempt, "step": damaged.step, "why": why}
    request_id = f"damaged-{damaged.attempt}-{damaged.step}"
    return lineage.append_journal(attempt, DAMAGED_CHECKPOINT_KIND, position, payload, request_id=request_id)


def damage_reports(lineage: Lineage) -> dict[CheckpointRef, str]:
    """What some attempt, live or not, could not restore from, and why; the first report of each counts."""
    found: dict[CheckpointRef, str] = {}
    for entry in lineage.all_journal_entries():
        if entry.kind == DAMAGED_CHECKPOINT_KIND:
            ref = CheckpointRef(entry.payload["attempt"], entry.payload["step"])
            found.setdefault(ref, str(entry.payload.get("why", "")))
    return found
