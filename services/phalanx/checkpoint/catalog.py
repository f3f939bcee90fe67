"""What a job's checkpoints are to those who ask: live, dead, damaged or open; pinned or not; how large.

Existence, state and pins are read from storage at each question. The database spares counting bytes again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum

from phalanx.checkpoint.collection import leftover
from phalanx.checkpoint.commits import tensor_bytes
from phalanx.checkpoint.facts import Facts
from phalanx.checkpoint.holds import Holds
from phalanx.checkpoint.jobs import HostedJob, Jobs
from phalanx.checkpoint.looking import Looker, Outlook
from phalanx.checkpoint.names import Selector
from phalanx.checkpoint.pins import PinLog, pinned
from phalanx.checkpoint.store import ABORTED, BEGUN, Database, Entry
from phalanx.lineage import CheckpointRef
from phalanx.lineage.lease_book import LeaseBook
from phalanx.lineage.registry import JobName
from phalanx.rpc import NotFound


class State(StrEnum):
    """What became of a checkpoint."""

    LIVE = "live"
    DEAD = "dead"
    DAMAGED = "damaged"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class View:
    """One checkpoint. pin_reason: None for one that is not pinned. created: None while it is open."""

    ref: CheckpointRef
    state: State
    pin_reason: str | None
    num_bytes: int
    world_size: int
    created: datetime | None


LEASE_EXPIRY_S = 600.0


class Outlooks:
    """Looks at jobs: storage, pins, forks, holds, leases and saves, together. lease_expiry_s: how long a lease holds of
    which nothing changes, by this process' clock.
    """

    def __init__(
        self, jobs: Jobs, pins: PinLog, database: Database, holds: Holds, lease_expiry_s: float = LEASE_EXPIRY_S
    ) -> None:
        self._jobs, self._pins, self._database, self._holds = jobs, pins, database, holds
        self._lease_expiry_s = lease_expiry_s
        self._lock = threading.Lock()
        self._lookers: dict[JobName, Looker] = {}

    def look(self, job: HostedJob) -> Outlook:
        """All that decisions on a job follow from, read now. What may protect a checkpoint is part of the stamp, or is
        read after the folders that could go.
        """
        decisions = self._pins.read(job.name)
        forks = self._jobs.fork_names(job.name)
        saves = self._database.saves(job.name)
        return self._looker(job).look(
            self._jobs.policy(job),
            pinned=pinned(decisions),
            forked=lambda: self._jobs.origins(job.name),
            used=lambda: self._holds.of(job.name),
            begun=frozenset(ref for ref, state in saves.items() if state == BEGUN),
            aborted=frozenset(ref for ref, state in saves.items() if state == ABORTED),
            stamp=lambda found: (found, len(decisions), frozenset(saves.items()), forks),
        )

    def stamp(self, job: HostedJob) -> object:
        """What the stamp of an outlook would be now."""
        saves = frozenset(self._database.saves(job.name).items())
        return self._looker(job).stamp(), self._pins.revision(job.name), saves, self._jobs.fork_names(job.name)

    def leases(self, job: HostedJob) -> LeaseBook:
        """The leases on the job's checkpoints."""
        return self._looker(job).leases

    def _looker(self, job: HostedJob) -> Looker:
        with self._lock:
            if job.name not in self._lookers:
                self._lookers[job.name] = Looker(job.store, lease_expiry_s=self._lease_expiry_s)
            return self._lookers[job.name]


class Catalog:
    """Answers about a job's checkpoints."""

    def __init__(self, outlooks: Outlooks, database: Database) -> None:
        self._outlooks, self._database = outlooks, database

    def views(self, job: HostedJob) -> tuple[View, ...]:
        """Every checkpoint and every open save, by attempt and step; brings the database in line with storage."""
        # What was known before the look and is not seen by it is gone; what is committed meanwhile is not dropped.
        entries = self._database.catalog(job.name)
        outlook = self._outlooks.look(job)
        facts = outlook.facts
        self._database.drop(job.name, entries.keys() - facts.committed)
        over = {ref for ref in outlook.begun | outlook.aborted if ref.attempt < facts.newest_attempt}
        self._database.forget_saves(job.name, over | ((outlook.begun | outlook.aborted) & facts.committed))
        views = [self._view(ref, facts, entries.get(ref) or self._entry(job, ref, outlook)) for ref in facts.committed]
        open_saves = {
            ref
            for ref in (outlook.folders.keys() | outlook.begun) - facts.committed
            if ref.attempt == facts.newest_attempt and leftover(ref, facts, outlook.begun, outlook.aborted).stays
        }
        views += [View(ref, State.OPEN, None, 0, 0, None) for ref in open_saves - facts.parents().keys()]
        return tuple(sorted(views, key=lambda view: view.ref))

    def committed(self, job: HostedJob, ref: CheckpointRef, entry: Entry) -> View:
        """What a checkpoint that was committed just now is: an attempt that was opened meanwhile may have left it."""
        is_live = any(link.attempt.number == ref.attempt and link.has_step(ref.step) for link in job.lineage.chain())
        state = State.LIVE if is_live else State.DEAD
        return View(ref, state, None, entry.num_bytes, entry.world_size, entry.created)

    def find(self, job: HostedJob, selector: Selector) -> View:
        """The checkpoint that is selected: by attempt and step any that exists, else a live one. Raises NotFound."""
        views = [view for view in self.views(job) if view.state != State.OPEN]
        if selector.ref is not None:
            found = [view for view in views if view.ref == selector.ref]
        else:
            live = [view for view in views if view.state == State.LIVE]
            found = live[-1:] if selector.step is None else [view for view in live if view.ref.step == selector.step]
        if not found:
            there = ", ".join(str(view.ref.step) for view in views if view.state == State.LIVE)
            raise NotFound(
                f"checkpoint of {job.name}",
                value=str(selector),
                expected=f"one of the live steps {there}" if there else "a job with a live checkpoint",
                remedy="list the checkpoints",
            )
        return found[0]

    def _entry(self, job: HostedJob, ref: CheckpointRef, outlook: Outlook) -> Entry:
        world_size = outlook.world_sizes.get(ref, 0)
        return self._database.note(job.name, ref, tensor_bytes(job.store, ref), world_size, datetime.now(UTC))

    def _view(self, ref: CheckpointRef, facts: Facts, entry: Entry) -> View:
        state = State.LIVE if facts.is_live(ref) else State.DEAD
        if ref in facts.damaged:
            state = State.DAMAGED
        return View(ref, state, facts.pinned.get(ref), entry.num_bytes, entry.world_size, entry.created)


def with_pin(view: View, reason: str | None) -> View:
    """The view once it is pinned, or not any more."""
    return replace(view, pin_reason=reason)
