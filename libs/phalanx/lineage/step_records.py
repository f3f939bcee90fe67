"""The step records of a job in storage: which windows were read and what each step measured, one object for a rank and
the steps up to a checkpoint. The live checkpoints name those that count, each once; their rows are in `records`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.core.digest import xxh3
from phalanx.lineage import keys
from phalanx.lineage.encoding import decode
from phalanx.lineage.errors import DamagedObject
from phalanx.lineage.job_objects import JobObjects
from phalanx.lineage.lists import decode_refs
from phalanx.lineage.records import StepRows, WindowRows, decode_records, encode_records
from phalanx.lineage.values import CheckpointRef, Manifest, ObjectRef, RecordsName
from phalanx.objects import ObjectMissing

if TYPE_CHECKING:
    from phalanx.lineage.store import Lineage


class StepRecords:
    """`Lineage.records`. Errors are as there."""

    def __init__(self, lineage: Lineage, objects: JobObjects) -> None:
        self._lineage, self._objects, self._store = lineage, objects, objects.store

    def put(
        self,
        attempt: int,
        rank: int,
        first_step: int,
        last_step: int,
        windows: WindowRows | None,
        steps: StepRows | None,
    ) -> ObjectRef:
        """Stores what `rank` records of the steps first_step .. last_step (both included); the same rows again are
        recognised.

        Raises ValueError for rows of other steps, DamagedObject if other rows are stored there.
        """
        name = RecordsName(attempt, rank, first_step, last_step)
        none = (WindowRows.concatenate(()), StepRows.concatenate(()))
        data = encode_records(name, windows or none[0], steps or none[1])
        self._objects.create_once(keys.records(name), data)
        return ObjectRef(keys.records(name), len(data), xxh3(data))

    def read(self, ref: ObjectRef) -> tuple[WindowRows, StepRows]:
        """The rows of one records object, verified against size and digest of `ref`."""
        name = keys.records_name(ref.key)
        if name is None:
            raise DamagedObject(ref.key, "is named as step records, but its key is none of theirs")
        return decode_records(ref.key, name, self._objects.read_verified(ref))

    def refs_of(self, manifest: Manifest) -> Iterator[ObjectRef]:
        """The records objects that a manifest names, those in its lists included."""
        yield from manifest.records
        for ref in manifest.record_lists:
            yield from decode_refs(ref.key, self._objects.read_verified(ref))

    def live_refs(self) -> Iterator[ObjectRef]:
        """The records objects that the live checkpoints name, those that were retired included, oldest first."""
        for link in self._lineage.chain():
            listed = self._store.list(keys.checkpoints_of(link.attempt.number))
            refs = (keys.manifest_ref(info.key) or keys.retired_ref(info.key) for info in listed)
            for ref in sorted({ref for ref in refs if ref is not None and link.has_step(ref.step)}):
                yield from self.refs_of(self._root(ref))

    def live(self) -> Iterator[tuple[WindowRows, StepRows]]:
        """The records of the live chain, one object (a rank's, up to one checkpoint) at a time."""
        return (self.read(ref) for ref in self.live_refs())

    def last_steps(self) -> dict[int, int]:
        """For each attempt, live or not, the last step of which it stored records (its parent's step if of none)."""
        last = {}
        for attempt in self._lineage.attempts():
            names = (keys.records_name(info.key) for info in self._store.list(keys.records_of(attempt.number)))
            last[attempt.number] = max((name.last_step for name in names if name), default=attempt.start_step)
        return last

    def _root(self, ref: CheckpointRef) -> Manifest:
        """What the manifest of a checkpoint says, or said before it was retired."""
        try:
            return decode(Manifest, keys.manifest(ref), self._store.read(keys.manifest(ref)))
        except ObjectMissing:
            return self._objects.read(Manifest, keys.retired(ref))
