"""Decisions about damaged shards, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from phalanx.lineage.plan import Spans


class Action(StrEnum):
    """SKIP: the windows that read the shard carry no loss. STOP: the job must stop. RETRY: the shard is whole."""

    SKIP = "skip"
    STOP = "stop"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged shard and the decision. shard: key of the object below the training split; zero_weight: half-open
    ranges of window positions; journal_entry: 0 for RETRY, of which nothing is written. source: of a mixture, which
    holds the shard; then its key is below the source's name, and windows: ranges of windows of that source's stream.
    """

    shard: str
    why: str
    action: Action
    zero_weight: Spans
    attempt: int
    journal_entry: int
    source: str = ""
    windows: Spans = ()
