"""Removes what nobody needs: mark, then sweep.

Whatever lies in the folder of a checkpoint that stays, stays: its parts can name nothing outside of it, so a damaged
part never makes garbage of what it named. Folders without a manifest are judged by `leftover`. Step records, journal,
attempts and events are never touched.

An object goes when it has been unreferenced for a grace, on the collector's own monotonic clock since it first saw it
so; a restart begins the grace anew. The order within a folder: keep the manifest's bytes for the proof (`retire`, live
checkpoints only), delete the manifest, then parts, then objects. Killed at any point, a checkpoint is whole or is not
there, and the next pass finds the rest. Before a manifest is deleted the checkpoint is marked, which keeps new readers
out, and goes only where none has a lease (`lineage.leases`). Right before anything of a folder is deleted the attempts,
the journal, the pins, the saves and the forks are listed again: where any is new, the pass ends and the next one
decides anew. Uploads in parts that nobody will finish are dropped alike.

A pass begins with what was found healthy: a promotion is stored before anything goes on its grounds. Nothing here is on
the way of a save: ranks and commits never wait for a pass, and a pass waits for no one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from phalanx.checkpoint.facts import Decision, Facts
from phalanx.checkpoint.looking import Outlook
from phalanx.checkpoint.retention import decide, needed_why
from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.lineage.lease_book import LeaseBook
from phalanx.lineage.leases import may_remove, removal_mark
from phalanx.lineage.promotions import promote
from phalanx.objects import ObjectInfo, ObjectStore, StoreDenied, StoreError

GRACE_S = 3600.0
_NUM_DELETERS = 8
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Removal:
    """What goes of one checkpoint or leftover, and why. removed: gone by now, all of it."""

    ref: CheckpointRef
    why: str
    num_objects: int
    num_bytes: int
    removed: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What a pass did, or would do. is_complete: False where it ended early because something changed meanwhile."""

    removals: tuple[Removal, ...]
    kept: tuple[Decision, ...]
    is_complete: bool = True


class OutlookChanged(Exception):
    """What a pass decides from is not so any more; nothing was removed on the old grounds."""


def verdicts(outlook: Outlook) -> Iterator[Decision]:
    """One decision for each folder: committed ones by `retention.decide`, others by `leftover`."""
    yield from decide(outlook.policy, outlook.facts)
    for ref in sorted(outlook.folders.keys() - outlook.facts.committed):
        yield leftover(ref, outlook.facts, outlook.begun, outlook.aborted)


def leftover(
    ref: CheckpointRef, facts: Facts, begun: Collection[CheckpointRef], aborted: Collection[CheckpointRef]
) -> Decision:
    """Whether the folder of a checkpoint that has no manifest stays, and why."""
    needed = needed_why(ref, facts)
    if needed is not None:
        return Decision(ref, True, needed)
    if ref.attempt < facts.newest_attempt:
        return Decision(ref, False, f"left behind by attempt {ref.attempt}, which attempt {facts.newest_attempt} ended")
    if ref in begun:
        return Decision(ref, True, "a save that was begun")
    if ref in aborted:
        return Decision(ref, False, "a save that was given up")
    last = max((done.step for done in facts.committed if done.attempt == ref.attempt), default=0)
    if ref.step > last:
        return Decision(ref, True, f"may be a save under way: attempt {ref.attempt} last committed step {last}")
    return Decision(ref, False, f"never committed: attempt {ref.attempt} went on and committed step {last}")


def _alone(ref: CheckpointRef) -> AbstractContextManager[bool]:
    return nullcontext(True)


class Collector:
    """Collects one job's garbage; one pass at a time. store: rooted at the job. look: a fresh outlook. stamp: what
    `Outlook.stamp` would be now. leases: of whoever reads the job. removal: has a checkpoint alone among the threads of
    this process (see `Holds.removal`). must_stop: asked between deletions.
    """

    def __init__(
        self,
        store: ObjectStore,
        look: Callable[[], Outlook],
        stamp: Callable[[], object],
        *,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
        leases: LeaseBook | None = None,
        removal: Callable[[CheckpointRef], AbstractContextManager[bool]] = _alone,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store, self._look, self._stamp, self._grace_s, self._clock = store, look, stamp, grace_s, clock
        self._leases = LeaseBook(store, clock=clock) if leases is None else leases
        self._removal, self._must_stop = removal, must_stop
        self._first_seen: dict[str, float] = {}

    def explain(self) -> Report:
        """What a pass would remove and keep, were every grace over."""
        outlook = self._look()
        decisions = tuple(verdicts(outlook))
        removals = []
        for decision in (decision for decision in decisions if not decision.stays):
            infos = self._garbage(decision.ref, outlook)
            if infos:
                removals.append(_removal(decision, infos, removed=False))
        return Report(tuple(removals), tuple(decision for decision in decisions if decision.stays))

    def collect(self) -> Report:
        """One pass."""
        outlook = self._look()
        for ref, why in outlook.promotions.items():
            promote(self._store, ref, why)
        decisions = tuple(verdicts(outlook))
        kept = tuple(decision for decision in decisions if decision.stays)
        removals: list[Removal] = []
        seen: dict[str, float] = {}
        going = [decision for decision in decisions if not decision.stays]
        for number, decision in enumerate(going):
            try:
                removal = None if self._must_stop() else self._sweep(decision, outlook, seen)
            except OutlookChanged:
                self._first_seen = seen | self._seen_of(going[number:])
                return Report(tuple(removals), kept, is_complete=False)
            if removal is not None:
                removals.append(removal)
        removals += self._drop_uploads(outlook, seen)
        self._leases.sweep()
        self._first_seen = seen
        return Report(tuple(removals), kept, is_complete=not self._must_stop())

    def _drop_uploads(self, outlook: Outlook, seen: dict[str, float]) -> list[Removal]:
        """Uploads in parts that nobody will finish: of a save that cannot be committed, or is."""
        try:
            uploads = self._store.uploads("a")
        except (StoreDenied, StoreError) as error:
            _LOG.warning(
                "unfinished uploads cannot be listed, a lifecycle rule of the bucket has to end them: %s", error
            )
            return []
        removals = []
        for upload in uploads:
            ref = keys.checkpoint_of(upload.key)
            if ref is None or not _is_over(ref, outlook):
                continue
            mark, now = f"{upload.key}?{upload.upload_id}", self._clock()
            seen[mark] = self._first_seen.get(mark, now)
            is_ripe = now - seen[mark] >= self._grace_s and not self._must_stop()
            if is_ripe:
                self._store.drop_upload(upload)
            removals.append(Removal(ref, f"an upload that nobody will finish: {upload.key}", 1, 0, is_ripe))
        return removals

    def _seen_of(self, decisions: list[Decision]) -> dict[str, float]:
        """When the objects of these were first seen, for the next pass."""
        folders = {keys.checkpoint(decision.ref) for decision in decisions}
        return {key: at for key, at in self._first_seen.items() if _folder_of(key) in folders}

    def remove_now(self, decision: Decision, outlook: Outlook) -> Removal | None:
        """Removes one checkpoint without a grace, as somebody asked for it; None where somebody holds it. Raises
        OutlookChanged where decisions must be made anew.
        """
        with self._removal(decision.ref) as is_free:
            if not is_free:
                return None
            self._check(outlook)
            infos = self._garbage(decision.ref, outlook)
            is_removed = self._delete(decision.ref, {info.key for info in infos}, outlook)
            return _removal(decision, infos, removed=True) if is_removed else None

    def _sweep(self, decision: Decision, outlook: Outlook, seen: dict[str, float]) -> Removal | None:
        with self._removal(decision.ref) as is_free:
            self._check(outlook)
            infos = self._garbage(decision.ref, outlook)
            now = self._clock()
            for info in infos:
                seen[info.key] = self._first_seen.get(info.key, now)
            if not infos:
                return None
            ripe = {info.key for info in infos if now - seen[info.key] >= self._grace_s}
            manifest, all_keys = keys.manifest(decision.ref), {info.key for info in infos}
            is_new_commit = manifest in all_keys and decision.ref not in outlook.facts.committed
            is_young = manifest in all_keys and manifest not in ripe
            if not is_free or is_new_commit or is_young or not ripe:
                return _removal(decision, infos, removed=False)
            is_removed = self._delete(decision.ref, ripe, outlook)
            return _removal(decision, infos, removed=is_removed and ripe == all_keys)

    def _check(self, outlook: Outlook) -> None:
        if self._stamp() != outlook.stamp:
            raise OutlookChanged

    def _garbage(self, ref: CheckpointRef, outlook: Outlook) -> list[ObjectInfo]:
        """All that goes of a folder: everything but the retired manifest of a live step."""
        spared = keys.retired(ref) if outlook.facts.is_live(ref) else None
        return [info for info in self._store.list(keys.checkpoint(ref)) if info.key != spared]

    def _delete(self, ref: CheckpointRef, ripe: set[str], outlook: Outlook) -> bool:
        """Deletes these of a folder; False, and nothing is touched, where somebody has a lease on the checkpoint."""
        manifest = keys.manifest(ref)
        if manifest in ripe:
            with removal_mark(self._store, ref) as mark:
                if self._leases.readers_of(ref) is not None:
                    return False
                self._check(outlook)  # whoever pinned it under a lease that has ended is seen by this, and only by this
                if outlook.facts.is_live(ref):
                    Lineage(self._store).retire(ref)
                if not may_remove(mark):
                    return False
                self._store.delete(manifest)
        rest = ripe - {manifest}
        parts = {key for key in rest if key.startswith(keys.parts(ref))}
        with ThreadPoolExecutor(_NUM_DELETERS, thread_name_prefix="sweep") as pool:
            for group in (parts, rest - parts):
                for _ in pool.map(self._store.delete, sorted(group)):
                    pass
        return True


def _is_over(ref: CheckpointRef, outlook: Outlook) -> bool:
    """Whether no rank may still upload for this checkpoint."""
    if ref.attempt > outlook.facts.newest_attempt or ref in outlook.facts.used:
        return False
    if ref in outlook.facts.committed:
        return True
    return not leftover(ref, outlook.facts, outlook.begun, outlook.aborted).stays


def _folder_of(key: str) -> str:
    ref = keys.checkpoint_of(key)
    return keys.checkpoint(ref) if ref else ""


def _removal(decision: Decision, infos: list[ObjectInfo], *, removed: bool) -> Removal:
    return Removal(decision.ref, decision.why, len(infos), sum(info.num_bytes for info in infos), removed)
