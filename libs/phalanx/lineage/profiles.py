"""Profiles of a run in its own store: what was asked for, who took it, and what each rank measured.

`profiles/<n>/request.json` asks, numbered from 1 and created once. Rank 0 of the newest attempt creates
`profiles/<n>/taken.json` before any rank begins; a request that was taken is never begun again, so that a profile that
ends its run does so once. Each rank that was asked creates `profiles/<n>/r<rank>-trace.json` and
`profiles/<n>/r<rank>-memory.json`, whole and once, when it has measured. Requests are carried out one after another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.lineage import keys
from phalanx.lineage.documents import decode_document, encode_document
from phalanx.lineage.values import Ordinal
from phalanx.objects import ObjectExists, ObjectStore

PROFILES: Final = "profiles/"
MOST_WAITING: Final = 8
MOST_STEPS: Final = 100
KINDS: Final = ("trace", "memory")
_KEY = re.compile(r"profiles/([0-9]{8})/(?:(request|taken)|r([0-9]{8})-(trace|memory))\.json")


@dataclass(frozen=True, slots=True)
class Request:
    """steps: how many steps to measure. ranks: which; none means all. request_id: the same again is the same
    request.
    """

    number: Ordinal
    steps: int
    ranks: tuple[int, ...]
    request_id: str

    def asks(self, rank: int) -> bool:
        """Whether this rank is to measure."""
        return not self.ranks or rank in self.ranks


@dataclass(frozen=True, slots=True)
class Taken:
    """By which attempt a request was begun."""

    attempt: Ordinal


@dataclass(frozen=True, slots=True)
class Found:
    """A request and what became of it. stored: keys below the job's root, with their sizes in bytes."""

    request: Request
    taken: Taken | None
    stored: dict[str, int]

    @property
    def ranks_done(self) -> tuple[int, ...]:
        """The ranks of which everything is stored."""
        by_rank = [found for found in map(_KEY.fullmatch, self.stored) if found is not None]
        ranks = [int(found[3]) for found in by_rank]
        return tuple(sorted({rank for rank in ranks if ranks.count(rank) == len(KINDS)}))

    @property
    def traces(self) -> dict[int, str]:
        """Keys of the stored traces, by rank in order."""
        found = filter(None, map(_KEY.fullmatch, self.stored))
        return dict(sorted((int(each[3]), each[0]) for each in found if each[4] == "trace"))


class Profiles:
    """The profiles of the job whose root `store` is."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def ask(self, steps: int, ranks: Sequence[int], request_id: str) -> Request:
        """Stores a request, or returns the one with this id. Raises PhalanxError for steps out of range, for an id that
        asked for something else, and while `MOST_WAITING` requests wait.
        """
        if not 1 <= steps <= MOST_STEPS:
            raise PhalanxError("--steps", value=steps, expected=f"1 to {MOST_STEPS}", remedy="measure fewer steps")
        chosen = tuple(sorted(set(ranks)))
        if chosen and chosen[0] < 0:
            raise PhalanxError("--ranks", value=chosen[0], expected="ranks from 0", remedy="correct it")
        while True:
            known = self.all()
            for found in known:
                if found.request.request_id == request_id:
                    return _same(found.request, steps, chosen)
            if sum(found.taken is None for found in known) >= MOST_WAITING:
                raise PhalanxError(
                    "profiles",
                    value=f"{MOST_WAITING} requests wait",
                    expected=f"fewer than {MOST_WAITING}, which are carried out one after another",
                    remedy="wait until the run has taken some (--list)",
                )
            request = Request(known[-1].request.number + 1 if known else 1, steps, chosen, request_id)
            try:
                self._store.create(_key(request.number, "request"), encode_document(request))
            except ObjectExists:
                continue
            return request

    def all(self) -> tuple[Found, ...]:
        """Every request, oldest first. Raises DamagedObject for one that can't be read."""
        sizes: dict[int, dict[str, int]] = {}
        for info in self._store.list(PROFILES):
            found = _KEY.fullmatch(info.key)
            if found is not None:
                sizes.setdefault(int(found[1]), {})[info.key] = info.num_bytes
        return tuple(self._found(number, of) for number, of in sorted(sizes.items()) if _key(number, "request") in of)

    def _found(self, number: int, sizes: dict[str, int]) -> Found:
        asked, taken = _key(number, "request"), _key(number, "taken")
        return Found(
            decode_document(Request, asked, self._store.read(asked)),
            decode_document(Taken, taken, self._store.read(taken)) if taken in sizes else None,
            {key: size for key, size in sizes.items() if key not in (asked, taken)},
        )

    def waiting(self) -> Request | None:
        """The oldest request that nobody has taken."""
        listed = [info.key for info in self._store.list(PROFILES)]
        there = set(listed)
        for key in listed:
            found = _KEY.fullmatch(key)
            if found is not None and found[2] == "request" and _key(int(found[1]), "taken") not in there:
                return decode_document(Request, key, self._store.read(key))
        return None

    def request(self, number: int) -> Request:
        """The request of that number; raises ObjectMissing, DamagedObject."""
        key = _key(number, "request")
        return decode_document(Request, key, self._store.read(key))

    def take(self, number: int, taken: Taken) -> bool:
        """Begins a request; False where somebody has begun it already."""
        try:
            self._store.create(_key(number, "taken"), encode_document(taken))
        except ObjectExists:
            return False
        return True

    def put(self, number: int, rank: int, kind: str, data: bytes) -> str:
        """Stores what a rank measured, of one of KINDS, and returns its key. Raises ObjectExists for a second one."""
        key = f"{PROFILES}{keys.number(number)}/r{keys.number(rank)}-{kind}.json"
        self._store.create(key, data)
        return key

    def read(self, key: str) -> bytes:
        """What is stored under a key of `Found.stored`."""
        return bytes(self._store.read(key))


def _same(known: Request, steps: int, ranks: tuple[int, ...]) -> Request:
    if (known.steps, known.ranks) == (steps, ranks):
        return known
    raise PhalanxError(
        "request id",
        value=known.request_id,
        expected=f"profile {known.number} again ({known.steps} steps of ranks {list(known.ranks) or 'all'})",
        remedy="give another profile a request id of its own",
    )


def _key(number: int, name: str) -> str:
    return f"{PROFILES}{keys.number(number)}/{name}.json"
