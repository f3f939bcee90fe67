"""Who works with a checkpoint right now, so that nothing of it is removed meanwhile, and the other way round.

A commit or a reader holds the checkpoint; a removal has it alone. Neither waits for the other: a removal of what is
held is left to the next pass, and who comes during a removal is refused.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.lineage import CheckpointRef
from phalanx.lineage.registry import JobName

Held = tuple[JobName, CheckpointRef]


class Holds:
    """The holds of one process; nothing outlives it, and nothing has to: its commits and readers end with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[tuple[JobName, CheckpointRef, str]] = Counter()
        self._removed: set[Held] = set()

    @contextmanager
    def hold(self, job: JobName, ref: CheckpointRef, what: str) -> Iterator[None]:
        """Nothing of the checkpoint is removed inside the block. Raises Unavailable where a removal goes on."""
        from phalanx.rpc import Unavailable  # not needed where commands collect without services

        key = (job, ref, what)
        with self._lock:
            if (job, ref) in self._removed:
                raise Unavailable(f"checkpoint {ref} of {job} is being removed right now; try again")
            self._held[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[key] -= 1
                if not self._held[key]:
                    del self._held[key]

    @contextmanager
    def removal(self, job: JobName, ref: CheckpointRef) -> Iterator[bool]:
        """True where nobody holds the checkpoint; nobody can take hold of it inside the block then."""
        with self._lock:
            is_free = not any(held[:2] == (job, ref) for held in self._held) and (job, ref) not in self._removed
            if is_free:
                self._removed.add((job, ref))
        try:
            yield is_free
        finally:
            if is_free:
                with self._lock:
                    self._removed.discard((job, ref))

    def of(self, job: JobName) -> dict[CheckpointRef, str]:
        """What is held of a job, and by what."""
        with self._lock:
            return {ref: what for held, ref, what in self._held if held == job}
