"""What is decided about a damaged shard, as values; pure.

A decision is an entry of kind `damage` in the journal of the attempt that reported it. Its payload is what
`docs/formats/lineage.md` says; `zero_weight_spans` reads the windows from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from phalanx.core.digest import digest_of
from phalanx.lineage import JournalEntry
from phalanx.lineage.plan import DAMAGE_KIND, Spans, spans_of


class Action(StrEnum):
    """SKIP: the windows that read the shard carry no loss. STOP: the job must stop. RETRY: the shard is whole."""

    SKIP = "skip"
    STOP = "stop"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged shard and the decision. shard: key of the object below the training split; zero_weight: half-open
    ranges of window positions; journal_entry: 0 for RETRY, of which nothing is written.
    """

    shard: str
    why: str
    action: Action
    zero_weight: Spans
    attempt: int
    journal_entry: int


def request_id_of(job: str, shard: str, digest: str, action: Action, reach: tuple[int, int]) -> str:
    """Names the decision, so that all who report one damage get one entry. reach: the windows that were looked at; a
    job that goes on for longer, or begins again earlier, needs another decision.
    """
    content = {"job": job, "shard": shard, "digest": digest, "action": action.value, "reach": list(reach)}
    return f"damage-{digest_of(content)}"


def payload_of(shard: str, number: int, why: str, action: Action, zero_weight: Spans) -> dict[str, object]:
    """The journal entry's payload. number: the shard's in its split."""
    return {
        "shard": shard,
        "number": number,
        "why": why,
        "action": action.value,
        "zero_weight": [list(span) for span in zero_weight],
    }


def damages_in(entries: Iterable[JournalEntry]) -> tuple[Damage, ...]:
    """The decisions among `entries`, in their order."""
    return tuple(damage_of(entry) for entry in entries if entry.kind == DAMAGE_KIND and "action" in entry.payload)


def damage_of(entry: JournalEntry) -> Damage:
    """The decision that an entry holds."""
    payload = entry.payload
    return Damage(
        shard=str(payload["shard"]),
        why=str(payload["why"]),
        action=Action(payload["action"]),
        zero_weight=spans_of(entry),
        attempt=entry.attempt,
        journal_entry=entry.number,
    )
