"""Reads a checkpoint again and tells how far it is, while nothing of it may be removed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

from phalanx.checkpoint.holds import Holds
from phalanx.checkpoint.jobs import HostedJob
from phalanx.checkpoint.wire import Progress
from phalanx.lineage import CheckpointRef, DamagedObject
from phalanx.lineage.leases import leased
from phalanx.rpc import Exhausted
from phalanx.snapshot.verify import Damage, checkpoint_bytes, verify

MAX_AT_ONCE, EVERY_S = 4, 0.5


class _Unwanted(Exception):
    """Nobody waits for the result any more."""


class Verifier:
    """Runs checks, a few at once: each reads all bytes of a checkpoint through this process."""

    def __init__(self, holds: Holds, max_at_once: int = MAX_AT_ONCE) -> None:
        self._holds, self._max_at_once = holds, max_at_once
        self._places = threading.BoundedSemaphore(max_at_once)

    def run(self, job: HostedJob, ref: CheckpointRef, over: threading.Event) -> Iterator[Progress]:
        """Progress every half a second, and at last the findings. Ends early once `over` is set. Raises Exhausted."""
        if not self._places.acquire(blocking=False):
            raise Exhausted(
                "checks at once", expected=f"at most {self._max_at_once}", remedy="wait until one of them has ended"
            )
        steps: queue.SimpleQueue[Progress | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._check, args=(job, ref, over, steps), name="verify", daemon=True).start()
        while True:
            step = steps.get()
            if isinstance(step, _Unwanted):
                return
            if isinstance(step, Exception):
                raise step
            yield step
            if step.findings is not None:
                return

    def _check(
        self, job: HostedJob, ref: CheckpointRef, over: threading.Event, steps: queue.SimpleQueue[Progress | Exception]
    ) -> None:
        """The last word is said once the checkpoint and the place are free again: who hears it may ask anew at once."""
        last: Progress | Exception
        try:
            with self._holds.hold(job.name, ref, "it is being verified"), leased(job.store, ref, "verify"):
                last = _checked(job, ref, over, steps)
        except Exception as error:  # noqa: BLE001 - raised again by `run`, which waits for it
            last = error
        finally:
            self._places.release()
        steps.put(last)


def _checked(
    job: HostedJob, ref: CheckpointRef, over: threading.Event, steps: queue.SimpleQueue[Progress | Exception]
) -> Progress:
    try:
        manifest = job.lineage.manifest(ref)
    except DamagedObject as error:
        return Progress(ref, 0, 0, (Damage(error.key, error.reason),))
    total_bytes, done_bytes, told_s = checkpoint_bytes(job.store, manifest), 0, float("-inf")

    def hear(num_bytes: int) -> None:
        nonlocal done_bytes, told_s
        done_bytes += num_bytes
        if over.is_set():
            raise _Unwanted
        if time.monotonic() - told_s >= EVERY_S:
            told_s = time.monotonic()
            steps.put(Progress(ref, done_bytes, total_bytes))

    damages = verify(job.store, manifest, hear)
    return Progress(ref, done_bytes, total_bytes, damages)
