"""Pruning by hand, straight on storage and without services: the same decisions and the same collector, in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from phalanx.checkpoint.collection import Collector, Report
from phalanx.checkpoint.facts import Policy
from phalanx.checkpoint.jobs import Jobs
from phalanx.checkpoint.looking import Looker, Outlook
from phalanx.checkpoint.pins import PinDecision, PinLog, pinned
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, events
from phalanx.lineage.lease_book import EXPIRY_S
from phalanx.lineage.registry import JobName, Registry
from phalanx.objects import ObjectStore

GRACE_S = 60.0


def prune(
    store: ObjectStore,
    policy: Policy,
    *,
    dry_run: bool,
    grace_s: float = GRACE_S,
    cluster: ObjectStore | None = None,
    name: JobName | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Removes what the policy does not keep and what nobody needs, in two looks `grace_s` apart: only what was
    unreferenced in both goes. Where somebody has a lease, as long as a lease lasts goes by before the first look, so
    that those of readers that were killed have ended; with no grace nothing is waited for, and they count. dry_run: one
    look, nothing goes. clock: monotonic seconds, as `sleep` lets them go by.

    store: rooted at the job. cluster, name: the cluster's root and the job's name there, where it was submitted; pins
    and forks are read from it. Raises PhalanxError for a submitted job without them.
    """
    if cluster is None and next(iter(store.list(events.PREFIX)), None) is not None:
        raise PhalanxError(
            "JOB",
            value=store.url,
            expected="the root of the cluster that it was submitted to, where its pins and forks stand",
            remedy="name it with --cluster URL, or prune through the services: "
            "`phalanx checkpoint prune projects/PROJECT/jobs/NAME`",
        )
    looker = Looker(store, lease_expiry_s=grace_s, clock=clock)
    known = _Known(cluster, name)
    collector = Collector(
        store,
        lambda: _look(looker, policy, known),
        lambda: known.stamp(looker.stamp()),
        grace_s=grace_s,
        clock=clock,
        leases=looker.leases,
    )
    if dry_run:
        return collector.explain()
    if grace_s > 0 and looker.leases.readers():
        sleep(max(grace_s, EXPIRY_S))
    report = collector.collect()
    if grace_s > 0 and report.removals:
        sleep(grace_s)
        report = collector.collect()
    return report


class _Known:
    """What a cluster knows of the job beside its own storage; nothing of one that was never submitted."""

    def __init__(self, cluster: ObjectStore | None, name: JobName | None) -> None:
        is_submitted = cluster is not None and name is not None
        self._name = name
        self._jobs = Jobs(Registry(cluster)) if is_submitted and cluster is not None else None
        self._pins = PinLog(cluster) if is_submitted and cluster is not None else None

    def decisions(self) -> tuple[PinDecision, ...]:
        return self._pins.read(self._name) if self._pins is not None and self._name is not None else ()

    def origins(self) -> Mapping[CheckpointRef, str]:
        return self._jobs.origins(self._name) if self._jobs is not None and self._name is not None else {}

    def forks(self) -> frozenset[JobName]:
        return self._jobs.fork_names(self._name) if self._jobs is not None and self._name is not None else frozenset()

    def stamp(self, found: frozenset[str]) -> object:
        """Of all that decisions follow from; found: of storage."""
        revision = self._pins.revision(self._name) if self._pins is not None and self._name is not None else 0
        return found, revision, self.forks()


def _look(looker: Looker, policy: Policy, known: _Known) -> Outlook:
    decisions, forks = known.decisions(), known.forks()
    return looker.look(
        policy,
        pinned=pinned(decisions),
        forked=known.origins,
        stamp=lambda found: (found, len(decisions), forks),
    )
