"""Pruning by hand, straight on storage and without services: the same decisions and the same collector, in one call."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.checkpoint.collection import Collector, Outlook, Report
from phalanx.checkpoint.jobs import Jobs
from phalanx.checkpoint.pins import PinLog, pinned
from phalanx.checkpoint.retention import Facts, Policy
from phalanx.checkpoint.survey import Surveyor
from phalanx.core.errors import PhalanxError
from phalanx.lineage import events
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
) -> Report:
    """Removes what the policy does not keep and what nobody needs, in two looks `grace_s` apart: only what was
    unreferenced in both goes. dry_run: one look, nothing goes.

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
    look, stamp = _looks(store, policy, cluster, name)
    collector = Collector(store, look, stamp, grace_s=grace_s)
    if dry_run:
        return collector.explain()
    report = collector.collect()
    if grace_s > 0 and report.removals:
        sleep(grace_s)
        report = collector.collect()
    return report


def _looks(
    store: ObjectStore, policy: Policy, cluster: ObjectStore | None, name: JobName | None
) -> tuple[Callable[[], Outlook], Callable[[], object]]:
    surveyor = Surveyor(store)
    jobs = None if cluster is None else Jobs(Registry(cluster))
    pins = None if cluster is None else PinLog(cluster)

    def look() -> Outlook:
        decisions = pins.read(name) if pins is not None and name is not None else ()
        forks = jobs.fork_names(name) if jobs is not None and name is not None else frozenset()
        survey = surveyor.look()
        facts = Facts(
            survey.links,
            survey.attempts,
            survey.committed,
            damaged=survey.damaged,
            pinned=pinned(decisions),
            forked=jobs.origins(name) if jobs is not None and name is not None else {},
        )
        return Outlook(
            policy,
            facts,
            survey.folders,
            world_sizes=survey.world_sizes,
            stamp=(survey.stamp, len(decisions), forks),
        )

    def stamp() -> object:
        revision = pins.revision(name) if pins is not None and name is not None else 0
        forks = jobs.fork_names(name) if jobs is not None and name is not None else frozenset()
        return surveyor.stamp(), revision, forks

    return look, stamp
