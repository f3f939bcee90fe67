"""Going back behind steps that went wrong: which checkpoints are too new, and the windows that are then left out.

Where services run, they remember what they decided. Where ranks decide together, the journal of the attempt that ends
says so, by an entry of kind `roll_back`; whoever opens the next attempt finds it there, live or not, as it finds
damaged checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.lineage.plan import SKIP_KIND, spans_of
from phalanx.lineage.store import Lineage
from phalanx.lineage.values import CheckpointRef

ROLL_BACK_KIND: Final = "roll_back"
# Steps in a row without a finite loss and gradient after which it is no passing fault; the monitor's rule has as many.
NOT_FINITE_AGAIN: Final = 3


@dataclass(frozen=True, slots=True)
class RollBack:
    """Attempt `attempt` went wrong in the steps from first_step to last_step, both included, whose windows are the
    half-open range [begin, end).
    """

    attempt: int
    first_step: int
    last_step: int
    begin: int
    end: int


def roll_back(lineage: Lineage, back: RollBack) -> None:
    """Writes it into the journal of the attempt that ends by it; said twice it is one entry."""
    payload = {"first_step": back.first_step, "last_step": back.last_step, "num_windows": back.end - back.begin}
    request_id = f"roll-back-{back.first_step}-{back.last_step}"
    lineage.append_journal(back.attempt, ROLL_BACK_KIND, back.begin, payload, request_id=request_id)


def roll_backs(lineage: Lineage) -> tuple[RollBack, ...]:
    """All that ranks decided together, in any attempt, live or not."""
    return tuple(
        RollBack(
            entry.attempt,
            int(entry.payload["first_step"]),
            int(entry.payload["last_step"]),
            entry.position,
            entry.position + int(entry.payload["num_windows"]),
        )
        for entry in lineage.all_journal_entries()
        if entry.kind == ROLL_BACK_KIND
    )


def too_new(lineage: Lineage, backs: Iterable[RollBack]) -> set[CheckpointRef]:
    """Live checkpoints that those steps, or later ones behind them, went into; those of attempts that began after the
    decision left their windows out.
    """
    return {
        ref
        for back in backs
        for ref in lineage.checkpoints()
        if ref.attempt <= back.attempt and ref.step >= back.first_step
    }


def leave_out(lineage: Lineage, attempt: int, spans: Iterable[tuple[int, int]], request: str) -> None:
    """Journals windows, as half-open ranges of positions, that `attempt` leaves out, where its journal does not hold
    them yet: an attempt without a checkpoint takes its entries with it. request: begins the request ids.
    """
    held = {span for entry in lineage.journal(attempt) if entry.kind == SKIP_KIND for span in spans_of(entry)}
    for begin, end in spans:
        if (begin, end) not in held:
            request_id = f"{request}-skip-{begin}-{end}"
            lineage.append_journal(attempt, SKIP_KIND, begin, {"num_windows": end - begin}, request_id=request_id)
