"""Which leases on a job's checkpoints hold, as one collector sees them; what a lease is: `leases`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from phalanx.lineage import keys
from phalanx.lineage.leases import RENEW_S, is_mark
from phalanx.lineage.values import CheckpointRef
from phalanx.objects import ObjectStore

EXPIRY_S: Final = 6 * RENEW_S


class LeaseBook:
    """What one collector knows of a job's leases. store: rooted at the job. clock: monotonic seconds of this process;
    a lease has ended where nothing of it changed between two looks that are `expiry_s` apart.
    """

    def __init__(
        self, store: ObjectStore, *, expiry_s: float = EXPIRY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._expiry_s, self._clock = store, max(expiry_s, EXPIRY_S), clock
        self._seen: dict[tuple[CheckpointRef, str], tuple[frozenset[str], float]] = {}
        self._lock = threading.Lock()

    def readers(self) -> dict[CheckpointRef, str]:
        """The checkpoints that somebody reads or copies now, and the lease's name; one look at storage."""
        return {ref: name for ref, name in self._held() if not is_mark(name)}

    def readers_of(self, ref: CheckpointRef) -> str | None:
        """The name of a lease that somebody has on this checkpoint now, or None."""
        return self.readers().get(ref)

    def sweep(self) -> int:
        """Deletes what is left of leases that have ended; how many there were."""
        self._held()
        now = self._clock()
        with self._lock:
            ended = [key for _, (found, since) in self._seen.items() if now - since >= self._expiry_s for key in found]
        for key in ended:
            self._store.delete(key)
        return len(ended)

    def _held(self) -> list[tuple[CheckpointRef, str]]:
        """The leases that have not ended, marks of removals included."""
        found: dict[tuple[CheckpointRef, str], set[str]] = {}
        for info in self._store.list(keys.LEASES):
            parts = keys.lease_parts(info.key)
            if parts is not None:
                found.setdefault(parts[:2], set()).add(info.key)
        now = self._clock()
        with self._lock:
            seen = {}
            for lease, objects in found.items():
                known, since = self._seen.get(lease, (frozenset(), now))
                seen[lease] = (frozenset(objects), since if known == objects else now)
            self._seen = seen
            return sorted(lease for lease, (_, since) in seen.items() if now - since < self._expiry_s)
