"""The journal's live rule, pure: each attempt's entries count up to the number that its child on the chain names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from phalanx.core.digest import digest_of
from phalanx.lineage.chain import live_chain
from phalanx.lineage.values import Attempt, JournalEntry


def live_journal(
    attempts: Iterable[Attempt], entries: Iterable[JournalEntry], tip: int | None = None
) -> tuple[JournalEntry, ...]:
    """Those of `entries` that hold for the highest attempt (or for `tip`), in the order of the chain, then by
    number.
    """
    links = {link.attempt.number: link for link in live_chain(attempts, tip)}
    live = [entry for entry in entries if entry.attempt in links and links[entry.attempt].has_entry(entry.number)]
    return tuple(sorted(live, key=lambda entry: (entry.attempt, entry.number)))


def journal_digest(entries: Iterable[JournalEntry]) -> str:
    """SHA-256 over the canonical JSON of the entries in their order."""
    return digest_of({"entries": [asdict(entry) for entry in entries]})
