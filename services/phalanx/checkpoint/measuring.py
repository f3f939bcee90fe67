"""What is measured of a job's checkpoints from what its storage holds: their loss, and whether training stayed healthy
behind them. Read only where the job's policy asks for it, and each object once: none of them ever changes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

import numpy as np

from phalanx.checkpoint.facts import Policy
from phalanx.checkpoint.health import LOSS_KINDS, Health, Trouble, Verdict, verdict
from phalanx.checkpoint.survey import Survey, Surveyor
from phalanx.lineage import CheckpointRef, DamagedObject, Lineage, Link, ObjectRef
from phalanx.lineage.events import EventLog, EventType, JobEvent
from phalanx.objects import ObjectStore

WINDOW_STEPS = 100
_LOG = logging.getLogger(__name__)


class Measurer:
    """Measures one job. store: rooted at the job."""

    def __init__(self, store: ObjectStore, surveyor: Surveyor) -> None:
        self._lineage, self._events, self._surveyor = Lineage(store), EventLog(store), surveyor
        self._losses: dict[str, Mapping[int, float]] = {}
        self._incidents: list[JobEvent] = []
        self._last_event = 0

    def values(self, policy: Policy, survey: Survey) -> dict[CheckpointRef, float]:
        """What the policy tells the best live regular checkpoints by; those of which it is not known are left out."""
        if not policy.keep_best or not policy.keep_latest:
            return {}
        live = [ref for ref in survey.recorded() if ref in survey.roots and not survey.roots[ref].speculative]
        if policy.best_by != "loss":
            found = {ref: survey.roots[ref].metrics.get(policy.best_by, math.nan) for ref in live}
        else:
            found = {ref: self._loss(survey, ref) for ref in live}
        return {ref: value for ref, value in found.items() if math.isfinite(value)}

    def verdicts(self, policy: Policy, survey: Survey) -> dict[CheckpointRef, Verdict]:
        """The verdict on each live speculative checkpoint that was not promoted."""
        asked = [ref for ref in survey.recorded() if ref in survey.speculative - survey.promoted]
        if not asked:
            return {}
        troubles = tuple(self._troubles(survey.links))
        return {ref: self._verdict(policy, survey, ref, troubles) for ref in asked}

    def _verdict(self, policy: Policy, survey: Survey, ref: CheckpointRef, troubles: tuple[Trouble, ...]) -> Verdict:
        steps = policy.healthy_steps
        try:
            losses = self._course(survey, ref.step - steps + 1, ref.step + steps)
        except DamagedObject as error:
            return Verdict(Health.UNHEALTHY, f"it cannot be told: {error}")
        return verdict(ref.step, losses, troubles, steps)

    def _loss(self, survey: Survey, ref: CheckpointRef) -> float:
        """Mean of the finite losses of the last steps up to the checkpoint; NaN where none is known."""
        try:
            course = self._course(survey, ref.step - WINDOW_STEPS + 1, ref.step)
        except DamagedObject as error:
            _LOG.warning("the loss of checkpoint %s is not known: %s", ref, error)
            return math.nan
        finite = [loss for loss in course.values() if math.isfinite(loss)]
        return math.fsum(finite) / len(finite) if finite else math.nan

    def _course(self, survey: Survey, first: int, last: int) -> dict[int, float]:
        """The loss of each recorded live step from `first` to `last`; NaN where loss or gradient norm is not finite.
        An overflow under a scaled loss, which a lower scale follows, is none of these: its loss counts.
        """
        course: dict[int, float] = {}
        for ref in _covering(survey.recorded(), first, last):
            for records in self._surveyor.root(ref).records:
                course |= self._losses_in(records)
        return {step: loss for step, loss in course.items() if first <= step <= last}

    def _losses_in(self, records: ObjectRef) -> Mapping[int, float]:
        if records.key not in self._losses:
            _, rows = self._lineage.records.read(records)
            is_finite = np.isfinite(rows.loss) & (np.isfinite(rows.gradient_norm) | rows.overflowed)
            losses = np.where(is_finite, rows.loss, np.nan)
            self._losses[records.key] = dict(zip(rows.step.tolist(), losses.tolist(), strict=True))
        return self._losses[records.key]

    def _troubles(self, links: Iterable[Link]) -> Iterable[Trouble]:
        """What the monitor told of the loss in steps of the live chain."""
        for event in self._events.after(self._last_event):
            self._last_event = event.number
            if event.type is EventType.INCIDENT and event.cause is not None and event.cause.kind in LOSS_KINDS:
                self._incidents.append(event)
        by_number = {link.attempt.number: link for link in links}
        for event in self._incidents:
            link = by_number.get(event.attempt)
            first, last = int(event.data.get("first_step", 0)), int(event.data.get("last_step", 0))
            if link is not None and event.cause is not None:
                first = max(first, link.attempt.start_step + 1)
                last = last if link.last_step is None else min(last, link.last_step)
                if first <= last:
                    yield Trouble(event.cause.kind, first, last)


def _covering(recorded: Iterable[CheckpointRef], first: int, last: int) -> Iterable[CheckpointRef]:
    """Those whose records tell of the steps `first` to `last`: from the first one at `first` or behind it, up to the
    first one at `last` or behind it. recorded: oldest first; each tells of the steps behind the one before it.
    """
    for ref in recorded:
        if ref.step >= first:
            yield ref
        if ref.step >= last:
            return
