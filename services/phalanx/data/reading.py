"""Hands out reading plans: the journal as storage has it now, the rules of `plans`, a look at the training split."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext

from phalanx.data.damage import fallen_away
from phalanx.data.jobs import FoundJob, JobSource, Journals, keep, require_job
from phalanx.data.mixing import Granting, wish_for_weights
from phalanx.data.plans import HorizonPolicy, JournalView, plan_for, require_newest
from phalanx.lineage.plan import ReadingPlan
from phalanx.lineage.registry import JobName
from phalanx.lineage.wishes import Wish
from phalanx.spec import Job
from phalanx.trainer.mixing import training_splits

KEPT_JOBS = 4096


class Reading:
    """Plans for every registered job.

    The manifest of a training split may hold a million shards, so the splits are looked at once a job.
    """

    def __init__(
        self,
        jobs: JobSource,
        journals: Journals,
        policy: HorizonPolicy,
        look: Callable[[Job], object] = training_splits,
    ) -> None:
        self._jobs, self._journals, self._policy, self._look = jobs, journals, policy, look
        self._granting = Granting()
        self._fit: OrderedDict[JobName, None] = OrderedDict()
        self._carried: OrderedDict[JobName, int] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, name: JobName, attempt: int, step: int, horizon_steps: int) -> ReadingPlan:
        """The plan of the newest attempt; raises NotFound, Superseded, PhalanxError, or what storage raises."""
        found = require_job(self._jobs, name)
        with self._granting.turn(name) if found.job.data.is_mixture else nullcontext():
            view = self._journals.view(found)
            require_newest(str(name), view.newest, attempt)
            if self._carry(found, view):
                view = self._journals.view(found)
            if step >= 0 and self._granting.grant(found, found.job, attempt, view.entries, step):
                view = self._journals.view(found)
            plan = plan_for(str(name), view, attempt, step, horizon_steps, self._policy)
            self._require_fit(found)
            self._granting.show(name, attempt, plan.horizon_step)
        return plan

    def wish(self, name: JobName, weights: Mapping[str, str], request_id: str) -> Wish:
        """Keeps a wish for other weights of the job's sources; raises NotFound, PhalanxError, what storage raises."""
        found = require_job(self._jobs, name)
        steps = self._jobs.current(found).training.steps
        return wish_for_weights(found.store, found.job, weights, request_id, steps)

    def _carry(self, found: FoundJob, view: JournalView) -> bool:
        """Writes into the journal of an attempt, once, the decisions about damage that fell away with older ones; tells
        whether there were any. Without it each attempt that left no checkpoint would take its decision with it, and the
        next would meet the same damage.
        """
        with self._lock:
            if self._carried.get(found.name) == view.newest:
                return False
        lost = fallen_away(found.lineage.all_journal_entries(), view.entries)
        for entry in lost:
            found.lineage.append_journal(
                view.newest, entry.kind, entry.position, entry.payload, request_id=entry.request_id
            )
        with self._lock:
            keep(self._carried, found.name, view.newest, KEPT_JOBS)
        return bool(lost)

    def _require_fit(self, found: FoundJob) -> None:
        with self._lock:
            if found.name in self._fit:
                return
        self._look(self._jobs.current(found))
        with self._lock:
            keep(self._fit, found.name, None, KEPT_JOBS)
