"""Tries what a store can do, with real objects under a name of their own, which it removes again."""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.objects.base import ObjectExists, ObjectMissing, ObjectStore

NUM_WRITERS, NUM_TIMED = 20, 10
_RACE_BYTES = 4096
_PARTS = "large objects in parts"
Promise = Literal["full", "single-writer", "unusable"]


class _UnmetError(Exception):
    """The store answered, but not as it must."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried. ok: None if this store has no such thing. detail: what was seen."""

    name: str
    ok: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a store did when tried. create_s, read_s: median seconds for an object of a few bytes."""

    url: str
    checks: tuple[Check, ...]
    create_s: float
    read_s: float

    def ok(self, name: str) -> bool | None:
        """The result of one check."""
        return next(check.ok for check in self.checks if check.name == name)

    @property
    def promise(self) -> Promise:
        """Full.

        Commits are safe whoever else writes. Single-writer: only while nobody else writes. Unusable: bytes are not
        safe.
        """
        if not all(self.ok(name) for name in ("write and read", "ranged reads", "list after write", "delete")):
            return "unusable"
        return "full" if self.ok("create-only") and self.ok("create-only, empty") else "single-writer"

    @property
    def puts_whole(self) -> bool:
        """Whether large objects go up in one put, because uploads in parts are not create-only here."""
        return self.ok(_PARTS) is False


def probe(store: ObjectStore) -> ProbeReport:
    """Tries `store`. Raises StoreDenied or StoreError where not even the first object can be written or removed."""
    name = f"phalanx-probe-{uuid.uuid4().hex}"
    place = store.within(name)
    with _cleaned(place):
        place.create("first", bytes(range(256)))
        checks = (
            _check("write and read", lambda: _write_and_read(place)),
            _check("ranged reads", lambda: _ranged_reads(place)),
            _check("list after write", lambda: _list_after_write(place)),
            _check("create-only", lambda: _race(place, "race", _RACE_BYTES)),
            _check("create-only, empty", lambda: _empty_over_full(place)),
            _check(_PARTS, lambda: _parts(place)),
            _check("delete", lambda: _delete(place)),
        )
        create_s = _median_s(lambda index: place.create(f"time/{index}", b"1234"))
        read_s = _median_s(lambda index: place.read(f"time/{index}"))
    return ProbeReport(store.url, checks, create_s, read_s)


@contextmanager
def _cleaned(place: ObjectStore) -> Iterator[None]:
    try:
        yield
    finally:
        for info in list(place.list()):
            place.delete(info.key)


def _check(name: str, attempt: Callable[[], str | None]) -> Check:
    try:
        detail = attempt()
    except (_UnmetError, OutsideError, PhalanxError, ObjectMissing, ObjectExists) as error:
        return Check(
            name, False, f"{type(error).__name__}: {error}" if not isinstance(error, _UnmetError) else str(error)
        )
    return Check(name, None, "this store needs none") if detail is None else Check(name, True, detail)


def _require(condition: bool, seen: str) -> None:
    if not condition:
        raise _UnmetError(seen)


def _write_and_read(place: ObjectStore) -> str:
    _require(place.read("first") == bytes(range(256)), "the bytes read back differ from those written")
    return "the bytes written come back"


def _ranged_reads(place: ObjectStore) -> str:
    for offset, length in ((0, 1), (100, 50), (255, 1)):
        wanted = bytes(range(offset, offset + length))
        _require(place.read("first", offset, length) == wanted, f"bytes {offset} to {offset + length} are wrong")
    return "exactly the bytes asked for"


def _list_after_write(place: ObjectStore) -> str:
    for index in range(5):
        place.create(f"list/{index}", b"")
        listed = [info.key for info in place.list("list/")]
        _require(len(listed) == index + 1, f"{len(listed)} of {index + 1} objects listed")
    return "each object listed at once"


def _race(place: ObjectStore, key: str, num_bytes: int) -> str:
    start = threading.Barrier(NUM_WRITERS)

    def write(writer: int) -> bool:
        start.wait()
        try:
            place.create(key, bytes([writer]) * num_bytes)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(NUM_WRITERS) as threads:
        won = list(threads.map(write, range(NUM_WRITERS)))
    _require(sum(won) == 1, f"{sum(won)} of {NUM_WRITERS} racing writers were told that they won")
    _require(place.read(key) == bytes([won.index(True)]) * num_bytes, "the object is not the winner's")
    return f"one of {NUM_WRITERS} racing writers won"


def _empty_over_full(place: ObjectStore) -> str:
    place.create("taken", b"taken")
    try:
        place.create("taken", b"")
    except ObjectExists:
        _require(place.read("taken") == b"taken", "an empty object replaced one that was there")
        return "an empty object replaces nothing"
    raise _UnmetError("an empty object may replace one that is there")


def _parts(place: ObjectStore) -> str | None:
    honoured = place.creates_large_objects_in_parts()
    _require(honoured is not False, "not create-only; objects are one upload each, of at most 5 GiB")
    return None if honoured is None else "create-only too"


def _delete(place: ObjectStore) -> str:
    place.create("gone", b"")
    place.delete("gone")
    _require(not list(place.list("gone")), "a deleted object is still listed")
    return "gone at once"


def _median_s(act: Callable[[int], object]) -> float:
    times_s = []
    for index in range(NUM_TIMED):
        start_s = time.perf_counter()
        act(index)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)
