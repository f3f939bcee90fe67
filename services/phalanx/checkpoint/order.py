"""The checkpoints of an attempt are committed by rising step, and no two of them name records of the same step.

A step that was kept in memory may be committed after the end of its attempt, while the commit of a later save, asked
for by ranks that are gone, is still under way. Whichever is first counts, and the other is refused: else the records of
some steps would stand in the proof twice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from phalanx.lineage import Lineage, Manifest, keys
from phalanx.lineage.registry import JobName
from phalanx.rpc import FailedPrecondition

MOST_KNOWN: Final = 1024


@dataclass(slots=True)
class _Known:
    """An attempt's newest checkpoint; step 0 for none. attempt 0: not looked up yet."""

    attempt: int = 0
    step: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class CommitOrder:
    """For all jobs of one process, which is the only one that commits. Safe from any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[JobName, _Known] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, job: JobName, lineage: Lineage, manifest: Manifest) -> Iterator[None]:
        """The body commits the manifest; no other commit of the job goes on beside it. Raises FailedPrecondition for
        one that is older than the attempt's newest checkpoint, or names records of steps up to that.
        """
        known = self._of(job)
        with known.lock:
            if known.attempt != manifest.attempt:
                mine = [ref.step for ref in lineage.checkpoints() if ref.attempt == manifest.attempt]
                known.attempt, known.step = manifest.attempt, max(mine, default=0)
            if known.step and known.step != manifest.step:
                _require_later(lineage, manifest, known.step)
            yield
            known.step = max(known.step, manifest.step)

    def _of(self, job: JobName) -> _Known:
        with self._lock:
            known = self._known.setdefault(job, _Known())
            self._known.move_to_end(job)
            if len(self._known) > MOST_KNOWN:
                idle = next((name for name, each in self._known.items() if not each.lock.locked()), job)
                if idle != job:
                    del self._known[idle]
            return known


def _require_later(lineage: Lineage, manifest: Manifest, newest: int) -> None:
    names = (keys.records_name(ref.key) for ref in lineage.records.refs_of(manifest))
    first = min((name.first_step for name in names if name is not None), default=newest + 1)
    if manifest.step < newest or first <= newest:
        raise FailedPrecondition(
            f"checkpoint {manifest.ref}",
            value=f"records from step {first} on",
            expected=f"steps behind {newest}, the newest checkpoint of the attempt",
            remedy="nothing: the attempt goes on, or the next one, from that one",
        )
