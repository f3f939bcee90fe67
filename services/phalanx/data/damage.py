"""What is decided about a damaged shard, and which windows that costs; pure.

A decision is an entry of kind `damage` in the journal of the attempt that reported it. Its payload is what
`docs/formats/lineage.md` says; `zero_weight_spans` reads the windows from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from phalanx.core.digest import digest_of
from phalanx.data.decisions import Action, Damage
from phalanx.lineage import JournalEntry
from phalanx.lineage.plan import DAMAGE_KIND, Spans, spans_of
from phalanx.stream.members import DamagedShard
from phalanx.stream.order import Order
from phalanx.stream.spans import as_array, at_most, clipped, merged

_LOG = logging.getLogger(__name__)


MAX_SPANS: Final = 8192
MAX_EPOCHS: Final = 64


@dataclass(frozen=True, slots=True)
class Finding:
    """A shard that is not what its manifest says. shard: the key that was reported; number: the shard's among those of
    all sources; digest: of its tar; objects: keys of all its objects that are wrong; is_index_lost: nobody can tell its
    documents.
    """

    shard: str
    number: int
    digest: str
    objects: tuple[str, ...]
    is_index_lost: bool
    why: str


def reach_of(order: Order, start: int, reported: int, end: int) -> tuple[int, int]:
    """The windows for which a decision is made: from the attempt's first to the job's last, at most `MAX_EPOCHS` epochs
    past the window at which the damage was met.

    start, reported, end: first window of the attempt, window of the report, first window behind the job's end.
    """
    return start, min(end, _epoch_end(order, reported, MAX_EPOCHS))


def covering(
    order: Order, entries: Iterable[JournalEntry], shard: str, start: int, reported: int, end: int
) -> Iterator[JournalEntry]:
    """The entries that take out, already, the windows of the object `shard` that an attempt from `start` on reads in
    the epoch of the report and the next.
    """
    needed = min(end, _epoch_end(order, reported, 1))
    for entry in entries:
        if entry.kind == DAMAGE_KIND and entry.payload.get("action") == Action.SKIP.value:
            first, stop = entry.payload["reach"]
            if shard in entry.payload["objects"] and first <= start and needed <= stop:
                yield entry


def lost_windows(order: Order, finding: Finding, reach: tuple[int, int], first_shard: int = 0) -> Spans:
    """The windows in `reach` that read the shard: all epochs in it, each by the inverse of its order. first_shard: of
    the order's source.

    Where its index is lost, or that of another shard of its block, those of the block. At most `MAX_SPANS` ranges: the
    smallest gaps are closed beyond that.
    """
    start, stop = reach
    if start >= stop:
        return ()
    epochs = range(order.epoch_of(start), order.epoch_of_last(stop - 1) + 1)
    number = finding.number - first_shard
    found = merged(np.concatenate([_lost_in(order, finding, number, epoch) for epoch in epochs]))
    return tuple((first, last) for first, last in at_most(clipped(found, start, stop), MAX_SPANS).tolist())


def allowed_shards(num_shards: int, budget: float) -> int:
    """How many shards of a split may be taken out: the share `budget` of them, and one at least unless it is 0."""
    return max(1, int(num_shards * budget)) if budget else 0


def shards_left_out(entries: Iterable[JournalEntry]) -> set[int]:
    """Numbers of the shards that decisions among `entries` have taken out."""
    skipped = (each for each in entries if each.kind == DAMAGE_KIND and each.payload.get("action") == Action.SKIP.value)
    return {int(entry.payload["number"]) for entry in skipped}


def decide(policy: str, zero_weight: Spans, reported: int, end: int) -> Action:
    """What is done about a shard that is really damaged. A job that would have nothing left to train on must stop."""
    rest = clipped(merged(as_array(zero_weight)), reported, end).tolist()
    return Action.SKIP if policy == Action.SKIP.value and rest != [[reported, end]] else Action.STOP


def request_id_of(finding: Finding, action: Action, reach: tuple[int, int]) -> str:
    """Names the decision within its job, so that all who report one damage get one entry. A job that goes on for
    longer, or begins again earlier, needs another decision.
    """
    content = {
        "objects": list(finding.objects),
        "digest": finding.digest,
        "action": action.value,
        "reach": list(reach),
    }
    return f"damage-{digest_of(content)}"


def payload_of(
    finding: Finding, action: Action, reach: tuple[int, int], lost: Spans, source: str = ""
) -> dict[str, object]:
    """The journal entry's payload. lost: windows; of a mixture those of the stream of `source`, where positions may
    change yet.
    """
    spans = [list(span) for span in lost] if action is Action.SKIP else []
    where = {"source": source, "windows": spans, "zero_weight": []} if source else {"zero_weight": spans}
    return {
        "shard": finding.shard,
        "number": finding.number,
        "objects": list(finding.objects),
        "why": finding.why,
        "action": action.value,
        "reach": list(reach),
        **where,
    }


def damages_in(entries: Iterable[JournalEntry]) -> tuple[Damage, ...]:
    """The decisions among `entries`, in their order."""
    return tuple(damage_of(entry) for entry in entries if entry.kind == DAMAGE_KIND and "action" in entry.payload)


def fallen_away(every: Iterable[JournalEntry], live: Iterable[JournalEntry]) -> tuple[JournalEntry, ...]:
    """The decisions to skip that attempts took which left no live checkpoint behind: among all entries of a job, those
    that say what none of the `live` ones says, each once.
    """
    known = {entry.request_id for entry in live}
    lost = (entry for entry in every if entry.kind == DAMAGE_KIND and entry.payload.get("action") == Action.SKIP.value)
    return tuple({entry.request_id: entry for entry in lost if entry.request_id not in known}.values())


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
        source=str(payload.get("source", "")),
        windows=tuple((int(start), int(stop)) for start, stop in payload.get("windows", ())),
    )


def _epoch_end(order: Order, position: int, epochs: int) -> int:
    """The first window that lies wholly behind the epoch of `position` and `epochs` more."""
    return -(-(order.epoch_of(position) + 1 + epochs) * order.epoch_tokens // order.seq_len)


def _lost_in(order: Order, finding: Finding, number: int, epoch: int) -> NDArray[np.int64]:
    if not finding.is_index_lost:
        try:
            return order.spans_of_shard(epoch, number)
        except DamagedShard as damage:
            _LOG.warning("the whole block of %s is left out in epoch %d: %s", finding.shard, epoch, damage)
    return as_array([order.span_of_block(epoch, number)])
