"""What operators ask of a run's order, and how it gets into the journal.

A wish is an object of its own, `wishes/<n>.json`, as only who hands out a reading plan knows from which window on a
change may hold: rank 0 of a job by itself, the data service of a job of the services. Whoever does so grants what was
wished since, each wish once, in the journal of its attempt. An entry holds from the first window that no plan has
shown yet. Killed before the entry is there, the next plan grants it; killed after it, the next attempt finds it in the
journal, or, where the attempt left no checkpoint, grants it anew from the same window on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.digest import canonical_json
from phalanx.core.errors import PhalanxError
from phalanx.lineage import keys
from phalanx.lineage.documents import decode_document, encode_document
from phalanx.lineage.errors import DamagedObject
from phalanx.lineage.plan import MIXTURE_KIND, zero_weight_spans
from phalanx.lineage.store import Lineage
from phalanx.lineage.values import JournalEntry, Ordinal
from phalanx.objects import ObjectExists, ObjectStore

WISHES: Final = "wishes/"
_WISH = re.compile(r"wishes/([0-9]{8})\.json")


@dataclass(frozen=True, slots=True)
class Wish:
    """kind, payload: of the journal entry that is asked for. request_id: the same again is the same wish."""

    number: Ordinal
    kind: str
    payload: Mapping[str, Any]
    request_id: str

    @property
    def entry_id(self) -> str:
        """The request id of the journal entry that grants it."""
        return f"wish-{self.number}"


class Wishes:
    """The wishes of the job whose root `store` is."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def add(self, kind: str, payload: Mapping[str, Any], request_id: str) -> Wish:
        """Stores a wish, or returns the one that has this request id; raises PhalanxError where that asks for something
        else.
        """
        while True:
            known = self.all()
            for wish in known:
                if wish.request_id == request_id:
                    return _same(wish, kind, payload)
            wish = Wish(len(known) + 1, kind, dict(payload), request_id)
            try:
                self._store.create(_key(wish.number), encode_document(wish))
            except ObjectExists:
                continue
            return wish

    def all(self) -> tuple[Wish, ...]:
        """Every wish, oldest first. Raises DamagedObject for one that is not what its key says, foreign or missing."""
        listed = [info.key for info in self._store.list(WISHES)]
        return tuple(self._read(number, key) for number, key in enumerate(listed, 1))

    def _read(self, number: int, key: str) -> Wish:
        if not _WISH.fullmatch(key) or key != _key(number):
            raise DamagedObject(key, f"is foreign, or wish {number} before it is missing")
        wish = decode_document(Wish, key, self._store.read(key))
        if wish.number != number:
            raise DamagedObject(key, f"says that it is wish {wish.number}")
        return wish


def _same(known: Wish, kind: str, payload: Mapping[str, Any]) -> Wish:
    if (known.kind, known.payload) == (kind, payload):
        return known
    raise PhalanxError(
        "request id",
        value=known.request_id,
        expected=f"wish {known.number} again ({_shown(known.kind, known.payload)}), not {_shown(kind, payload)}",
        remedy="give another wish a request id of its own",
    )


def _shown(kind: str, payload: Mapping[str, Any]) -> str:
    return f"{kind} {canonical_json(dict(payload)).decode()}"


def grant(lineage: Lineage, wishes: Wishes, attempt: int, live: Sequence[JournalEntry], position: int) -> bool:
    """Writes what was wished, and is not in the journal `live` of `attempt` yet, into it; tells whether there was any.

    position: of the first window that no plan of the attempt has shown.
    """
    granted = {entry.request_id for entry in live}
    due = [wish for wish in wishes.all() if wish.entry_id not in granted]
    if not due:
        return False
    known = {entry.request_id: entry.position for entry in lineage.all_journal_entries() if entry.attempt != attempt}
    earliest = earliest_change(live, position)
    for wish in due:
        earliest = max(earliest, known.get(wish.entry_id, 0))
        lineage.append_journal(attempt, wish.kind, earliest, wish.payload, request_id=wish.entry_id)
    return True


def earliest_change(live: Iterable[JournalEntry], position: int) -> int:
    """From where a change may hold, `position` at the earliest: not before one that is decided, nor before windows that
    were taken out by their positions, which would be others then.
    """
    entries = tuple(live)
    changes = [entry.position for entry in entries if entry.kind == MIXTURE_KIND]
    return max([position, *changes, *(stop for _, stop in zero_weight_spans(entries))])


def _key(number: int) -> str:
    return f"{WISHES}{keys.number(number)}.json"
