"""Begins, commits and gives up saves, for many jobs at once.

A commit is the library's (`snapshot.commit`), run in a thread of its own: who asked may go away, what can be finished
is finished, and asking again joins the commit under way or finds the checkpoint. Killed in the middle, the checkpoint
exists or it does not; the same request answers alike afterwards. At most `max_commits` wait or work at once, each up to
its own deadline.

Right before the manifest is put, the database notes its digest, and only the manifest noted first is ever put: so one
commit counts also where the store has no create-only put and would let a second one replace it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime

from phalanx.checkpoint.holds import Holds
from phalanx.checkpoint.jobs import HostedJob
from phalanx.checkpoint.order import CommitOrder
from phalanx.checkpoint.store import ABORTED, BEGUN, Database, Entry
from phalanx.core.digest import xxh3
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, DamagedObject, Lineage, Manifest, keys
from phalanx.lineage.damage import report_damage
from phalanx.lineage.encoding import encode
from phalanx.lineage.registry import JobName
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.rpc import AlreadyExists, Exhausted, FailedPrecondition, Superseded, Unavailable
from phalanx.snapshot.commit import FILLED_IN, commit

COMMIT_DEADLINE_S, MAX_COMMITS, MAX_WAITING, LONGEST_WHY = 600.0, 64, 1024, 2000
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that exists, and what the catalog says of it."""

    manifest: Manifest
    entry: Entry


class Commits:
    """The commits of one process."""

    def __init__(self, database: Database, holds: Holds, max_commits: int = MAX_COMMITS) -> None:
        self._database, self._holds, self._max_commits = database, holds, max_commits
        self._places = threading.BoundedSemaphore(max_commits)
        self._lock = threading.Lock()
        self._order = CommitOrder()
        self._flights: dict[tuple[JobName, CheckpointRef], Future[Committed]] = {}

    @property
    def num_in_flight(self) -> int:
        """Commits that wait or work now."""
        with self._lock:
            return len(self._flights)

    def begin(self, job: HostedJob, ref: CheckpointRef) -> None:
        """From now on nothing in the checkpoint's folder is collected until it is committed, given up or superseded.
        Raises Superseded for an older attempt.
        """
        start = require_newest(job.lineage, ref.attempt)
        if ref.step <= start:
            raise PhalanxError(
                "step", value=ref.step, expected=f"one after step {start}, from which the attempt started", remedy=_ASK
            )
        with self._holds.hold(job.name, ref, "a save that begins"):
            if not _exists(job.store, keys.manifest(ref)):
                self._database.set_save(job.name, ref, BEGUN)

    def abort(self, job: HostedJob, ref: CheckpointRef) -> None:
        """The save will not be committed; what it wrote becomes garbage. Raises Superseded for an older attempt."""
        require_newest(job.lineage, ref.attempt)
        with self._lock:
            is_under_way = (job.name, ref) in self._flights
        if is_under_way or _exists(job.store, keys.manifest(ref)):
            raise FailedPrecondition(
                f"checkpoint {ref}",
                expected="a save of which no commit was asked",
                remedy="nothing is to be given up: it is committed, or about to be",
            )
        self._database.set_save(job.name, ref, ABORTED)

    def commit(self, job: HostedJob, draft: Manifest, deadline_s: float) -> Future[Committed]:
        """The commit of the draft, begun now or under way already; its result may be that of another draft (see
        `require_same`). Raises Superseded for an older attempt.
        """
        require_newest(job.lineage, draft.attempt)
        key = (job.name, draft.ref)
        with self._lock:
            flight = self._flights.get(key)
            if flight is not None:
                return flight
            if len(self._flights) >= self._max_commits + MAX_WAITING:
                raise Exhausted(
                    "commits at once", value=len(self._flights), expected=f"at most {MAX_WAITING} waiting", remedy=_ASK
                )
            flight = self._flights[key] = Future()
        end_s = time.monotonic() + deadline_s
        try:
            threading.Thread(target=self._fly, args=(job, draft, end_s, flight), name="commit", daemon=True).start()
        except RuntimeError as error:
            self._land(job, draft)
            flight.set_exception(Unavailable(f"checkpoint {draft.ref}: no thread for its commit: {error}"))
        return flight

    def _fly(self, job: HostedJob, draft: Manifest, end_s: float, flight: Future[Committed]) -> None:
        try:
            committed = self._committed(job, draft, end_s)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for the flight
            self._land(job, draft)
            _LOG.warning("commit of %s of %s failed: %s", draft.ref, job.name, error)
            flight.set_exception(error)
        else:
            self._land(job, draft)
            flight.set_result(committed)

    def _land(self, job: HostedJob, draft: Manifest) -> None:
        with self._lock:
            del self._flights[(job.name, draft.ref)]

    def _committed(self, job: HostedJob, draft: Manifest, end_s: float) -> Committed:
        if not self._places.acquire(timeout=max(0.0, end_s - time.monotonic())):
            others = f"{self._max_commits} other commits left no place within its deadline"
            raise Unavailable(f"checkpoint {draft.ref}: {others}")

        try:
            with self._holds.hold(job.name, draft.ref, "a commit"):
                manifest = find(job.lineage, draft.ref)
                if manifest is None:
                    lineage = _Arbitrated(job, self._database, self._order)
                    manifest = _commit(lineage, job, draft, max(0.0, end_s - time.monotonic()))
                num_bytes = tensor_bytes(job.store, draft.ref)
                now = datetime.now(UTC)
                return Committed(
                    manifest, self._database.note(job.name, draft.ref, num_bytes, manifest.world_size, now)
                )
        finally:
            self._places.release()


def report(job: HostedJob, attempt: int, damaged: CheckpointRef, why: str) -> None:
    """A rank of the attempt can't restore the checkpoint: it goes into the attempt's journal. Raises Superseded."""
    require_newest(job.lineage, attempt)
    try:
        position = job.lineage.manifest(damaged).loader.position
    except DamagedObject:
        position = 0
    report_damage(job.lineage, attempt, damaged, position, why[:LONGEST_WHY])


def require_newest(lineage: Lineage, attempt: int) -> int:
    """The step from which the attempt started. Raises Superseded where a newer one was opened, FailedPrecondition where
    this one was not.
    """
    newest = lineage.newest_attempt()
    number = newest.number if newest is not None else 0
    if attempt < number:
        raise Superseded(
            f"attempt {attempt}",
            expected=f"the newest attempt, which is {number}",
            remedy="end its ranks: nothing they write counts any more",
        )
    if newest is None or attempt > number:
        raise FailedPrecondition(
            f"attempt {attempt}", expected=f"the newest attempt, which is {number}", remedy="open the attempt first"
        )
    return newest.start_step


def find(lineage: Lineage, ref: CheckpointRef) -> Manifest | None:
    """The manifest of a checkpoint that exists, or was committed and removed since; None where it never was."""
    try:
        return lineage.manifest(ref)
    except DamagedObject as error:
        if not isinstance(error.__cause__, ObjectMissing):
            raise
        return lineage.retired(ref)


def require_same(draft: Manifest, manifest: Manifest) -> None:
    """Raises AlreadyExists unless the manifest is what came of the draft."""
    filled = {name: getattr(manifest, name) for name in FILLED_IN}
    if dataclasses.replace(draft, **filled) != manifest:
        raise AlreadyExists(
            f"checkpoint {draft.ref}",
            expected="the draft with which it was committed",
            remedy="a step of an attempt is committed once; save at another step",
        )


def tensor_bytes(store: ObjectStore, ref: CheckpointRef) -> int:
    """Bytes of the objects that hold a checkpoint's tensors."""
    return sum(info.num_bytes for info in store.list(keys.objects(ref)))


class _Arbitrated(Lineage):
    """A job's lineage whose commits the database decides before the store is asked."""

    def __init__(self, job: HostedJob, database: Database, order: CommitOrder) -> None:
        super().__init__(job.store)
        self._job, self._database, self._order = job.name, database, order

    def commit(self, manifest: Manifest) -> None:
        """As the lineage's. Raises AlreadyExists where another manifest was decided for this checkpoint, and what
        `CommitOrder` raises.
        """
        with self._order.turn(self._job, self, manifest):
            self._decide_and_commit(manifest)

    def _decide_and_commit(self, manifest: Manifest) -> None:
        digest = xxh3(encode(manifest))
        if self._database.decide(self._job, manifest.ref, digest) != digest:
            raise AlreadyExists(
                f"checkpoint {manifest.ref}", expected="the manifest that another commit of it brought", remedy=_ASK
            )
        super().commit(manifest)


def _commit(lineage: Lineage, job: HostedJob, draft: Manifest, deadline_s: float) -> Manifest:
    try:
        return commit(lineage, job.store, draft, draft.world_size, deadline_s)
    except ValueError as error:
        raise PhalanxError(
            f"draft of {draft.ref}", value=str(error), expected="a checkpoint that can exist", remedy=_ASK
        ) from error


def _exists(store: ObjectStore, key: str) -> bool:
    try:
        store.info(key)
    except ObjectMissing:
        return False
    return True


_ASK = "save again at the next due step"
