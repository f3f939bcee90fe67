"""What a job's store says about its checkpoints: live ones, dead ones and why, and the content of one. Plain values for
tables and JSON.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from phalanx.checkpoint.pins import PinLog, pinned
from phalanx.checkpoint.place import JobPlace
from phalanx.checkpoint.retention import why_dead
from phalanx.lineage import Attempt, CheckpointRef, DamagedObject, Lineage, Manifest, keys
from phalanx.objects import ObjectStore, StoreDenied
from phalanx.snapshot.dtypes import DTYPES
from phalanx.snapshot.index import Index

_LOG = logging.getLogger(__name__)
_REMOVED = "removed to save space; its step records stay"


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint in a list. why_dead: None for a live one. num_bytes: of everything stored for it. speculative:
    taken between the regular ones; promoted: one of these that was found healthy. metrics: what was measured of it, by
    name. pin_reason: None for one that is not pinned.
    """

    attempt: int
    step: int
    num_bytes: int
    world_size: int | None
    why_dead: str | None
    speculative: bool = False
    promoted: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    pin_reason: str | None = None

    @property
    def state(self) -> str:
        """In words: live or why not, and what else is so."""
        words = [self.why_dead or "live"]
        if self.speculative:
            words.append("promoted" if self.promoted else "speculative")
        if self.pin_reason is not None:
            words.append(f"pinned: {self.pin_reason}" if self.pin_reason else "pinned")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_boxes: int


def checkpoint_rows(
    store: ObjectStore, *, dead: bool, pins: Mapping[CheckpointRef, str] | None = None
) -> list[CheckpointRow]:
    """All live checkpoints, and with `dead` also the committed ones off the live chain and the saves without a
    manifest. pins: what is pinned, with the reasons.
    """
    lineage = Lineage(store)
    chain, attempts = lineage.chain(), lineage.attempts()
    live = set(lineage.checkpoints())
    rows: list[CheckpointRow] = []
    for attempt in attempts:
        found = _stored(store, attempt)
        for ref, num_bytes in sorted(found.sizes.items()):
            if ref in found.committed:
                why = None if ref in live else why_dead(ref, attempts, chain)
            else:
                why = _REMOVED if ref in found.retired else "never committed: it has no manifest"
            if why is None or dead:
                row = _row(lineage, ref, num_bytes, why) if ref in found.committed else _bare(ref, num_bytes, why)
                rows.append(replace(row, promoted=ref in found.promoted, pin_reason=(pins or {}).get(ref)))
    return sorted(rows, key=lambda row: (row.attempt, row.step))


def one_row(
    lineage: Lineage, store: ObjectStore, manifest: Manifest, pins: Mapping[CheckpointRef, str]
) -> CheckpointRow:
    """The row of one checkpoint that is committed."""
    is_live = manifest.ref in set(lineage.checkpoints())
    why = None if is_live else why_dead(manifest.ref, lineage.attempts(), lineage.chain())
    infos = list(store.list(keys.checkpoint(manifest.ref)))
    row = _row(lineage, manifest.ref, sum(info.num_bytes for info in infos), why)
    promoted = any(info.key == keys.promoted(manifest.ref) for info in infos)
    return replace(row, promoted=promoted, pin_reason=pins.get(manifest.ref))


def pins_of(place: JobPlace) -> dict[CheckpointRef, str]:
    """What is pinned of a job, as the root of the cluster that its store lies in says; nothing where it lies in none.
    Where that may not be read, a warning says so.
    """
    name = place.name
    if name is None:
        return {}
    root = place.store.url.rstrip("/").removesuffix(str(name)).rstrip("/")
    try:
        return pinned(PinLog(place.open(root)).read(name))
    except StoreDenied as error:
        _LOG.warning("pins are not shown: %s", error)
        return {}


def tensor_rows(index: Index) -> list[TensorRow]:
    """The tensors of a checkpoint, by name."""
    return [
        TensorRow(name, t.dtype, t.global_shape, math.prod(t.global_shape) * DTYPES[t.dtype].itemsize, len(t.boxes))
        for name, t in index.tensors.items()
    ]


def ancestry(lineage: Lineage, manifest: Manifest) -> list[CheckpointRef]:
    """The checkpoints that the attempt of `manifest` started from, nearest first, back to the beginning."""
    attempts = {attempt.number: attempt for attempt in lineage.attempts()}
    found: list[CheckpointRef] = []
    parent = attempts[manifest.attempt].parent
    while parent is not None:
        found.append(parent)
        parent = attempts[parent.attempt].parent
    return found


@dataclass(frozen=True, slots=True)
class _Stored:
    """What is stored of each save of an attempt: its bytes; which have a manifest, had one, were promoted."""

    sizes: dict[CheckpointRef, int]
    committed: set[CheckpointRef]
    retired: set[CheckpointRef]
    promoted: set[CheckpointRef]


def _stored(store: ObjectStore, attempt: Attempt) -> _Stored:
    found = _Stored({}, set(), set(), set())
    for info in store.list(keys.checkpoints_of(attempt.number)):
        ref = keys.checkpoint_of(info.key)
        if ref is not None:
            found.sizes[ref] = found.sizes.get(ref, 0) + info.num_bytes
            marks = ((keys.manifest, found.committed), (keys.retired, found.retired), (keys.promoted, found.promoted))
            for key_of, marked in marks:
                if info.key == key_of(ref):
                    marked.add(ref)
    return found


def _row(lineage: Lineage, ref: CheckpointRef, num_bytes: int, why: str | None) -> CheckpointRow:
    try:
        manifest = lineage.manifest(ref)
    except DamagedObject as error:
        return _bare(ref, num_bytes, why or str(error))
    metrics = dict(manifest.metrics)
    return CheckpointRow(
        ref.attempt, ref.step, num_bytes, manifest.world_size, why, manifest.speculative, metrics=metrics
    )


def _bare(ref: CheckpointRef, num_bytes: int, why: str | None) -> CheckpointRow:
    return CheckpointRow(ref.attempt, ref.step, num_bytes, None, why)
