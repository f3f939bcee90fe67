"""Verdicts of the monitor, acted on: the event first, the journal after it. The same incident again changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.lineage import Lineage
from phalanx.lineage.events import Cause, EventType
from phalanx.lineage.plan import SKIP_KIND
from phalanx.lineage.registry import JobName
from phalanx.train.book import Book, Draft
from phalanx.train.decide import Record
from phalanx.train.requests import check_request_id
from phalanx.train.states import Intent, Job
from phalanx.train.values import IncidentAction


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the monitor says. first_step, last_step: the affected ones; 0 for none."""

    request_id: str
    attempt: int
    cause: Cause
    action: IncidentAction
    first_step: int = 0
    last_step: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """What is done about it, which may be less than was asked for, and why."""

    action: IncidentAction
    why: str


_DONE: Final = {
    IncidentAction.NOTIFY: "told to people; the run goes on",
    IncidentAction.SKIP: "its windows are left out when they are read again; the run goes on",
    IncidentAction.ROLL_BACK: "the attempt ends; the next one starts before it and leaves its windows out",
    IncidentAction.RESTART: "the attempt ends; the next one starts from the newest checkpoint",
}


class Incidents:
    """Acts on verdicts. Every method may raise what the book raises."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def report(self, name: JobName, verdict: Verdict, actor: str) -> Done:
        """What is done about it. Raises PhalanxError for a verdict that makes no sense."""
        _check(verdict)
        done = acted_on(self._book.job(name), verdict)

        def decision(job: Job) -> Draft | None:
            nonlocal done
            done = acted_on(job, verdict)
            if verdict.request_id in job.requests or verdict.attempt < job.attempt:
                return None
            data = {"action": str(done.action), "first_step": verdict.first_step, "last_step": verdict.last_step}
            message = done.why or _DONE[done.action]
            kind = EventType.INCIDENT
            record = Record(kind, job.attempt, verdict.first_step, verdict.cause, message, data=data)
            return Draft(record, actor, verdict.request_id)

        known = self._known(name, verdict)
        if known is None:
            self._book.change(name, decision)
        else:
            done = known
        if done.action is IncidentAction.SKIP:
            self._journal(name, verdict)
        return done

    def _known(self, name: JobName, verdict: Verdict) -> Done | None:
        """What was done about this very incident."""
        if verdict.request_id not in self._book.job(name).requests:
            return None
        for event in self._book.events(name, 0):
            if event.request_id == verdict.request_id and event.type is EventType.INCIDENT:
                return Done(IncidentAction(event.data["action"]), "known already")
        return None

    def _journal(self, name: JobName, verdict: Verdict) -> None:
        """The windows are left out whenever they are read again; later attempts journal it with their start."""
        job = self._book.job(name)
        if not job.is_live or job.attempt != verdict.attempt:
            return
        windows = int(job.spec["training"]["global_batch_size"])
        lineage = Lineage(self._book.store(name))
        begin, end = lineage.windows_of(verdict.first_step, verdict.last_step, windows)
        lineage.append_journal(
            job.attempt, SKIP_KIND, begin, {"num_windows": end - begin}, request_id=verdict.request_id
        )


def acted_on(job: Job, verdict: Verdict) -> Done:
    """What is done about a verdict as the job stands: pure."""
    notify = IncidentAction.NOTIFY
    if verdict.attempt != job.attempt or not job.is_live:
        return Done(notify, f"attempt {verdict.attempt} is over")
    if verdict.action in (IncidentAction.ROLL_BACK, IncidentAction.RESTART):
        if job.intent is not Intent.RUN:
            return Done(notify, "the job is being stopped")
        if job.ending is not None:
            return Done(notify, "the attempt is being ended already")
    return Done(verdict.action, "")


def _check(verdict: Verdict) -> None:
    check_request_id(verdict.request_id, is_needed=True)
    needs_steps = verdict.action in (IncidentAction.SKIP, IncidentAction.ROLL_BACK)
    if (needs_steps and verdict.first_step < 1) or verdict.first_step > max(verdict.last_step, 0):
        raise PhalanxError(
            "first_step",
            value=verdict.first_step,
            expected=f"a step from 1 to last_step {verdict.last_step}",
            remedy="name the steps",
        )
