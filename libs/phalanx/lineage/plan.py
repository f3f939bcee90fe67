"""Reading plans, pure: what the journal of an attempt says about its reading, up to a horizon.

Who gives plans (storage alone, or the data service) and who checks them afterwards (the proof) take them from here, so
that all tell the same from the same journal. Payloads are in docs/formats/lineage.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from phalanx.lineage.journal import journal_digest
from phalanx.lineage.store import Lineage
from phalanx.lineage.values import CheckpointRef, JournalEntry

Spans: TypeAlias = tuple[tuple[int, int], ...]
LostWindows: TypeAlias = tuple[tuple[str, Spans], ...]

HORIZON_STEPS: Final = 16
SKIP_KIND: Final = "skip"
DAMAGE_KIND: Final = "damage"
ZERO_WEIGHT_KINDS: Final = (SKIP_KIND, DAMAGE_KIND)
DAMAGED_CHECKPOINT_KIND: Final = "damaged_checkpoint"
MIXTURE_KIND: Final = "mixture"


@dataclass(frozen=True, slots=True)
class MixtureChange:
    """From window `position` on, sources have other weights: (name, number as text) of those that change, by name."""

    position: int
    weights: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """No window of a step after `horizon_step` is read without a new plan.

    zero_weight: half-open ranges of window positions that keep their places but carry no loss and are not read, in the
    journal's order. lost: for a source of a mixture, by name, half-open ranges of the windows of its own stream of
    which the same is true. mixture: changes of the weights, in the journal's order; their positions do not decrease.
    journal_digest: of the journal from which the plan follows.
    """

    horizon_step: int
    zero_weight: Spans
    journal_digest: str
    mixture: tuple[MixtureChange, ...] = ()
    lost: LostWindows = ()


def reading_plan(entries: Sequence[JournalEntry], step: int, horizon_steps: int = HORIZON_STEPS) -> ReadingPlan:
    """The plan that holds once `step` is done, for an attempt whose journal `entries` is."""
    return ReadingPlan(
        step + horizon_steps,
        zero_weight_spans(entries),
        journal_digest(entries),
        mixture_changes(entries),
        lost_windows(entries),
    )


def zero_weight_spans(entries: Iterable[JournalEntry]) -> Spans:
    """Half-open position ranges that skipped and damaged windows cover, in the journal's order.

    An entry lists its ranges as `zero_weight`, or means `num_windows` from its position on.
    """
    return tuple(span for entry in entries if entry.kind in ZERO_WEIGHT_KINDS for span in spans_of(entry))


def mixture_changes(entries: Iterable[JournalEntry]) -> tuple[MixtureChange, ...]:
    """What the journal changes of a mixture's weights."""
    return tuple(
        MixtureChange(entry.position, tuple(sorted((str(k), str(v)) for k, v in entry.payload["weights"].items())))
        for entry in entries
        if entry.kind == MIXTURE_KIND
    )


def lost_windows(entries: Iterable[JournalEntry]) -> LostWindows:
    """The windows that damage takes out of the streams of a mixture's sources, by name."""
    lost: dict[str, Spans] = {}
    for entry in entries:
        if entry.kind in ZERO_WEIGHT_KINDS and "source" in entry.payload:
            spans = tuple((int(start), int(stop)) for start, stop in entry.payload["windows"])
            lost[str(entry.payload["source"])] = lost.get(str(entry.payload["source"]), ()) + spans
    return tuple(sorted(lost.items()))


def spans_of(entry: JournalEntry) -> Spans:
    """The ranges of positions of one entry that takes windows out; none where it names windows of a source instead."""
    if "source" in entry.payload:
        return ()
    if "zero_weight" in entry.payload:
        return tuple((int(start), int(stop)) for start, stop in entry.payload["zero_weight"])
    return ((entry.position, entry.position + int(entry.payload["num_windows"])),)


def damaged_checkpoints(lineage: Lineage) -> frozenset[CheckpointRef]:
    """Checkpoints that some attempt, live or not, could not restore from; a new attempt must not name them as its
    parent.
    """
    return frozenset(
        CheckpointRef(entry.payload["attempt"], entry.payload["step"])
        for entry in lineage.all_journal_entries()
        if entry.kind == DAMAGED_CHECKPOINT_KIND
    )
