"""What the tests of the lineage share: values that are valid wherever a test does not care, and stores that fail on
demand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from phalanx.core.digest import digest_of, sha256
from phalanx.core.step_parts import Part
from phalanx.lineage import (
    Attempt,
    CheckpointRef,
    Lineage,
    LoaderState,
    Manifest,
    ObjectRef,
    StepRows,
    WindowRows,
    journal_digest,
)
from phalanx.objects import ObjectInfo, ObjectStore, open_store

Result = TypeVar("Result")

IDENTITY = sha256(b"identity")
CODE = sha256(b"code")
PLACEMENT = {"layout": {"pp": 1, "dp_shard": 2}}


def memory_store(name: str = "") -> ObjectStore:
    return open_store(f"memory://{name}").within("projects/p/jobs/j/")


def lineage_with_counted_requests(store: ObjectStore) -> Lineage:
    counter = itertools.count(1)
    return Lineage(store, new_request_id=lambda: f"request-{next(counter)}")


def open_next(lineage: Lineage, avoid: tuple[CheckpointRef, ...] = ()) -> Attempt:
    return lineage.open_attempt(code_digest=CODE, identity_digest=IDENTITY, placement=PLACEMENT, avoid=avoid)


def an_attempt(number: int, parent: CheckpointRef | None = None, journal: tuple[tuple[int, int], ...] = ()) -> Attempt:
    return Attempt(number, parent, journal, journal_digest(()), CODE, IDENTITY, PLACEMENT, f"request-{number}")


def a_manifest(attempt: int, step: int, records: tuple[ObjectRef, ...] = (), **fields: object) -> Manifest:
    values: dict[str, object] = {
        "world_size": 2,
        "identity_digest": IDENTITY,
        "placement_digest": digest_of(PLACEMENT),
        "code_digest": CODE,
        "journal_digest": journal_digest(()),
        "loader": LoaderState(step, step * 4),
        "schedule": {"loss_scale": 1.0, "tokens": step * 32},
        "records": records,
        "parts": (),
    }
    return Manifest(attempt, step, **(values | fields))  # type: ignore[arg-type]


def window_rows(steps: list[int], positions: list[int], seq_len: int = 8) -> WindowRows:
    """Windows of one segment each, on shard 0, one after another in member 0."""
    position = np.array(positions, np.int64)
    count = len(positions)
    return WindowRows(
        step=np.array(steps, np.int64),
        position=position,
        weight=np.ones(count, np.float32),
        xxh3=position.astype(np.uint64) * np.uint64(2**60 + 7),
        segment_window=np.arange(count, dtype=np.int64),
        shard=np.zeros(count, np.int64),
        member=np.zeros(count, np.int64),
        offset=position * seq_len,
        length=np.full(count, seq_len, np.int64),
    )


def step_rows(steps: list[int]) -> StepRows:
    step = np.array(steps, np.int64)
    return StepRows(
        step=step,
        loss=4.0 / step,
        gradient_norm=0.5 / step,
        valid_tokens=step * 0 + 30,
        step_time_s=step * 0 + 0.25,
        **{part.value: step * 0 + 0.03125 * place for place, part in enumerate(Part)},
    )


class Killed(BaseException):
    """The process died: nothing may catch it."""


def die() -> None:
    raise Killed


class InterruptedStore:
    """A store at whose operation number `at` (from 0) an event happens, before the operation or right after it took
    effect.
    """

    def __init__(self, inner: ObjectStore, at: int, event: Callable[[], object], after: bool = False) -> None:
        self._inner, self._at, self._event, self._after = inner, at, event, after
        self.url = inner.url
        self.operations = 0

    @property
    def happened(self) -> bool:
        return self.operations > self._at

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._run(lambda: self._inner.read(key, offset, length))

    def create(self, key: str, data: bytes) -> None:
        self._run(lambda: self._inner.create(key, data))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(self._run(lambda: tuple(self._inner.list(prefix))))

    def _run(self, operation: Callable[[], Result]) -> Result:
        mine = self.operations == self._at
        self.operations += 1
        if mine and not self._after:
            self._event()
        result = operation()
        if mine and self._after:
            self._event()
        return result


class LostReplyStore(InterruptedStore):
    """A store whose every create takes effect, loses its reply and is sent again, as a client with retries does."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner, -1, die)

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        super().create(key, data)
