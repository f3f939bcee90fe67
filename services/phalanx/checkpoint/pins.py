"""Pins: create-only decisions `registry/pins/<project>/<uid>/<n>.json` in the cluster's root.

The revision of a job's pins is the number of its last decision; what is pinned follows from all of them, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from phalanx.lineage import CheckpointRef, DamagedObject
from phalanx.lineage.documents import decode_document, encode_document
from phalanx.lineage.registry import JobName
from phalanx.objects import ObjectExists, ObjectStore


@dataclass(frozen=True, slots=True)
class PinDecision:
    """One pin or unpin. actor: subject of the token that asked for it."""

    number: Annotated[int, Field(ge=1)]
    action: Literal["pin", "unpin"]
    attempt: Annotated[int, Field(ge=1)]
    step: Annotated[int, Field(ge=0)]
    reason: str
    request_id: str
    actor: str

    @property
    def ref(self) -> CheckpointRef:
        """The checkpoint that is meant."""
        return CheckpointRef(self.attempt, self.step)


def pinned(decisions: Iterable[PinDecision]) -> dict[CheckpointRef, str]:
    """What is pinned after all `decisions`, with the reason given last."""
    found: dict[CheckpointRef, str] = {}
    for decision in decisions:
        if decision.action == "pin":
            found[decision.ref] = decision.reason
        else:
            found.pop(decision.ref, None)
    return found


class PinLog:
    """The decisions of all jobs below the cluster's root `store`. Whoever cannot read them must not delete: an object
    that is not a decision is a DamagedObject.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def revision(self, job: JobName) -> int:
        """The number of the last decision; 0 before the first."""
        return len(self._keys(job))

    def read(self, job: JobName) -> tuple[PinDecision, ...]:
        """All decisions of a job, in order."""
        return tuple(_decoded(key, number, self._store.read(key)) for number, key in enumerate(self._keys(job), 1))

    def create(self, job: JobName, decision: PinDecision) -> bool:
        """Writes the next decision; False where that number is taken by another."""
        key = _key(job, decision.number)
        try:
            self._store.create(key, encode_document(decision))
        except ObjectExists:
            return _decoded(key, decision.number, self._store.read(key)) == decision
        return True

    def _keys(self, job: JobName) -> list[str]:
        found = [info.key for info in self._store.list(_prefix(job))]
        for number, key in enumerate(found, 1):
            if key != _key(job, number):
                raise DamagedObject(key, f"is not decision {number} on pins, which is missing")
        return found


def _prefix(job: JobName) -> str:
    return f"registry/pins/{job.project}/{job.uid}/"


def _key(job: JobName, number: int) -> str:
    return f"{_prefix(job)}{number:08d}.json"


def _decoded(key: str, number: int, data: bytes) -> PinDecision:
    decision = decode_document(PinDecision, key, data)
    if decision.number != number:
        raise DamagedObject(key, f"says that it is decision {decision.number}")
    return decision
