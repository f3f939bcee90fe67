"""Operators' writes and the background: pins, deletes, prunes, and a collection of every job now and then.

Pins are decided in storage and carry their request id there. Deletes and prunes are remembered in the database before
they act: asked again after a kill, they finish what was begun.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from phalanx.checkpoint.catalog import Catalog, Outlooks, View, with_pin
from phalanx.checkpoint.collection import GRACE_S, Collector, OutlookChanged, Removal, Report
from phalanx.checkpoint.facts import Decision
from phalanx.checkpoint.holds import Holds
from phalanx.checkpoint.jobs import HostedJob, Jobs
from phalanx.checkpoint.looking import Outlook
from phalanx.checkpoint.names import Selector, ref_text
from phalanx.checkpoint.pins import PinDecision, PinLog, pinned
from phalanx.checkpoint.retention import needed_why, resume_why
from phalanx.checkpoint.store import LONGEST_ID, Database
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef
from phalanx.lineage.leases import leased
from phalanx.lineage.registry import JobName
from phalanx.rpc import AlreadyExists, FailedPrecondition, Unavailable

INTERVAL_S, LONGEST_PAUSE = 300.0, 15
_NUM_COLLECTORS, _TRIES = 4, 5
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asking:
    """Who asks for a write. expected_revision: of the job's pins as the caller saw them; 0 does not check."""

    request_id: str
    expected_revision: int
    actor: str


@dataclass(slots=True)
class Quiet:
    """How long a job has been quiet. left: passes that skip it yet."""

    left: int = 0
    pause: int = 0
    views: tuple[View, ...] = ()

    def saw(self, views: tuple[View, ...], *, is_idle: bool) -> None:
        """A pass found these checkpoints, and nothing to remove where it is idle."""
        is_quiet = is_idle and views == self.views
        self.pause = min(2 * self.pause + 1, LONGEST_PAUSE) if is_quiet else 0
        self.left, self.views = self.pause, views


class Curator:
    """Decides what stays. on_report: hears of each pass; on_failure: of each that failed."""

    def __init__(
        self,
        jobs: Jobs,
        catalog: Catalog,
        outlooks: Outlooks,
        pins: PinLog,
        database: Database,
        holds: Holds,
        *,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
        on_report: Callable[[Report], None] = lambda _: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._jobs, self._catalog, self._outlooks, self._pins = jobs, catalog, outlooks, pins
        self._database, self._holds, self._grace_s, self._clock = database, holds, grace_s, clock
        self._on_report, self._on_failure = on_report, on_failure
        self._lock = threading.Lock()
        self._collectors: dict[JobName, tuple[Collector, threading.Lock]] = {}
        self._quiet: dict[JobName, Quiet] = {}
        self._stop = threading.Event()

    # Pins.

    def pin(self, job: HostedJob, selector: Selector, reason: str, asking: Asking) -> tuple[View, int]:
        """Pins a checkpoint; the view and the revision of the pins. Without a reason one that is pinned keeps its own.
        Raises NotFound, FailedPrecondition (another revision), AlreadyExists (the request id was used for something
        else).
        """
        while True:
            decisions = self._pins.read(job.name)
            earlier = _earlier(decisions, "pin", selector, asking.request_id)
            if earlier is not None:
                return with_pin(self._view(job, earlier.ref), earlier.reason), earlier.number
            _check_revision(len(decisions), asking)
            view = self._catalog.find(job, selector)
            with self._holds.hold(job.name, view.ref, "a pin"), leased(job.store, view.ref, "pin"):
                view = self._catalog.find(job, Selector(ref=view.ref))
                why = reason or pinned(decisions).get(view.ref, "")
                if self._decide(job, "pin", view.ref, why, len(decisions) + 1, asking):
                    return with_pin(view, why), len(decisions) + 1

    def unpin(self, job: HostedJob, selector: Selector, asking: Asking) -> tuple[View, int]:
        """Takes a pin back; as `pin`."""
        while True:
            decisions = self._pins.read(job.name)
            earlier = _earlier(decisions, "unpin", selector, asking.request_id)
            if earlier is not None:
                return with_pin(self._view(job, earlier.ref), None), earlier.number
            _check_revision(len(decisions), asking)
            ref = self._pinned_ref(job, selector, pinned(decisions))
            view = self._view(job, ref)
            if self._decide(job, "unpin", ref, "", len(decisions) + 1, asking):
                return with_pin(view, None), len(decisions) + 1

    def revision(self, job: HostedJob) -> int:
        """The revision of a job's pins."""
        return self._pins.revision(job.name)

    def _decide(
        self, job: HostedJob, action: Literal["pin", "unpin"], ref: CheckpointRef, reason: str, number: int, ask: Asking
    ) -> bool:
        decision = PinDecision(number, action, ref.attempt, ref.step, reason, ask.request_id, ask.actor)
        return self._pins.create(job.name, decision)

    def _pinned_ref(self, job: HostedJob, selector: Selector, pins: Mapping[CheckpointRef, str]) -> CheckpointRef:
        found = [
            ref for ref in pins if selector.ref == ref or (selector.step is not None and selector.step == ref.step)
        ]
        if selector.ref is None and (selector.step is None or len(found) > 1):
            found = [self._catalog.find(job, selector).ref]
        if not found or found[0] not in pins:
            raise FailedPrecondition(
                f"pin of {job.name}", expected="a checkpoint that is pinned", remedy="list the checkpoints"
            )
        return found[0]

    def _view(self, job: HostedJob, ref: CheckpointRef) -> View:
        return self._catalog.find(job, Selector(ref=ref))

    # Deletes and prunes.

    def delete(self, job: HostedJob, selector: Selector, asking: Asking) -> tuple[int, int]:
        """Removes one checkpoint at once; objects and bytes that went. Raises FailedPrecondition for one that is
        pinned, in use or needed to resume.
        """
        asked = {"kind": "delete", "job": str(job.name), "selector": str(selector)}
        known = self._known(asking.request_id, asked)
        if known is not None and known["answer"] is not None:
            return int(known["answer"]["num_objects"]), int(known["answer"]["num_bytes"])
        if known is None:
            _check_revision(self._pins.revision(job.name), asking)
            ref = self._catalog.find(job, selector).ref
            self._refuse_needed(job, ref)
            self._database.ask(asking.request_id, {**asked, "attempt": ref.attempt, "step": ref.step})
        else:
            ref = CheckpointRef(known["asked"]["attempt"], known["asked"]["step"])
        removal = self._removed_now(job, ref)
        self._database.answer(asking.request_id, {"num_objects": removal.num_objects, "num_bytes": removal.num_bytes})
        self._on_report(Report((removal,), ()))
        return removal.num_objects, removal.num_bytes

    def _removed_now(self, job: HostedJob, ref: CheckpointRef) -> Removal:
        collector, lock = self._collector(job)
        with lock:
            for _ in range(_TRIES):
                outlook = self._refuse_needed(job, ref)
                try:
                    removal = collector.remove_now(Decision(ref, False, "an operator deleted it"), outlook)
                except OutlookChanged:
                    continue
                if removal is not None:
                    return removal
        raise Unavailable(f"checkpoint {ref} of {job.name} is in use; try again")

    def _refuse_needed(self, job: HostedJob, ref: CheckpointRef) -> Outlook:
        outlook = self._outlooks.look(job)
        why = needed_why(ref, outlook.facts) or resume_why(ref, outlook.facts)
        if why is not None:
            raise FailedPrecondition(
                f"checkpoint {ref_text(ref)} of {job.name}",
                value=why,
                expected="one that is neither pinned, nor in use, nor needed to resume",
                remedy="unpin it, or delete another one",
            )
        return outlook

    def prune(self, job: HostedJob, request_id: str, *, dry_run: bool) -> Report:
        """Applies retention and collects garbage now; dry_run: says what would go, were every grace over."""
        if dry_run:
            return self._collector(job)[0].explain()
        asked = {"kind": "prune", "job": str(job.name)}
        known = self._known(request_id, asked)
        if known is not None and known["answer"] is not None:
            return _report_of(known["answer"])
        self._database.ask(request_id, asked)
        report = self.collect(job)
        self._database.answer(request_id, asdict(report))
        return report

    def _known(self, request_id: str, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        _check_id(request_id)
        known = self._database.asked(request_id)
        if known is None:
            return None
        if {key: known.asked.get(key) for key in asked} != dict(asked):
            raise _used(request_id)
        return {"asked": known.asked, "answer": known.answer}

    # Collection.

    def collect(self, job: HostedJob) -> Report:
        """One pass over a job, after any pass that is under way."""
        collector, lock = self._collector(job)
        with lock:
            report = collector.collect()
        self._on_report(report)
        return report

    def collect_all(self) -> None:
        """One pass over every registered job that is due; what fails is logged and counted, and tried again at the
        next. A job in which nothing goes on is looked at ever less often, down to every `LONGEST_PAUSE` passes.
        """
        with ThreadPoolExecutor(_NUM_COLLECTORS, thread_name_prefix="collect") as pool:
            for _ in pool.map(self._collect_safely, filter(self._is_due, self._jobs.all())):
                pass

    def wake(self, job: HostedJob) -> None:
        """Something goes on in the job: the next pass looks at it."""
        self._quiet.pop(job.name, None)

    def _is_due(self, job: HostedJob) -> bool:
        quiet = self._quiet.setdefault(job.name, Quiet())
        quiet.left -= 1
        return quiet.left < 0

    def run(self, interval_s: float) -> None:
        """Collects every `interval_s`, until `stop`."""
        while not self._stop.wait(interval_s):
            try:
                self.collect_all()
            except Exception as error:  # noqa: BLE001 - told, counted and tried again: nothing may end the collection
                self._failed("the registry", error)

    def stop(self) -> None:
        """Ends `run`, and passes between two deletions."""
        self._stop.set()

    def _collect_safely(self, job: HostedJob) -> None:
        try:
            views, report = self._catalog.views(job), self.collect(job)
            self._quiet.setdefault(job.name, Quiet()).saw(views, is_idle=report.is_complete and not report.removals)
        except Exception as error:  # noqa: BLE001 - one job's trouble must not keep the others from being collected
            self._failed(str(job.name), error)

    def _failed(self, what: str, error: Exception) -> None:
        is_known = isinstance(error, OutsideError | PhalanxError)
        _LOG.error("nothing is collected of %s: %s", what, error, exc_info=None if is_known else error)
        self._on_failure()

    def _collector(self, job: HostedJob) -> tuple[Collector, threading.Lock]:
        def removal(ref: CheckpointRef) -> AbstractContextManager[bool]:
            return self._holds.removal(job.name, ref)

        with self._lock:
            if job.name not in self._collectors:
                collector = Collector(
                    job.store,
                    lambda: self._outlooks.look(job),
                    lambda: self._outlooks.stamp(job),
                    grace_s=self._grace_s,
                    clock=self._clock,
                    leases=self._outlooks.leases(job),
                    removal=removal,
                    must_stop=self._stop.is_set,
                )
                self._collectors[job.name] = (collector, threading.Lock())
            return self._collectors[job.name]


def _earlier(
    decisions: tuple[PinDecision, ...], action: str, selector: Selector, request_id: str
) -> PinDecision | None:
    """The decision that this very request brought about, if it was made before."""
    _check_id(request_id)
    for decision in decisions:
        if decision.request_id == request_id:
            is_other = (selector.ref is not None and selector.ref != decision.ref) or (
                selector.step is not None and selector.step != decision.step
            )
            if decision.action != action or is_other:
                raise _used(request_id)
            return decision
    return None


def _check_id(request_id: str) -> None:
    if not 1 <= len(request_id) <= LONGEST_ID:
        raise PhalanxError(
            "request_id",
            value=request_id[:LONGEST_ID],
            expected=f"a fresh id of this request, of 1 to {LONGEST_ID} characters",
            remedy="let the client choose one",
        )


def _check_revision(revision: int, asking: Asking) -> None:
    if asking.expected_revision and asking.expected_revision != revision:
        raise FailedPrecondition(
            "expected_revision",
            value=asking.expected_revision,
            expected=f"the revision of the job's pins, which is {revision}",
            remedy="list the checkpoints again and decide anew",
        )


def _used(request_id: str) -> AlreadyExists:
    return AlreadyExists(
        "request_id",
        value=request_id,
        expected="an id that was not used for another request",
        remedy="choose a fresh one",
    )


def _report_of(answer: Mapping[str, Any]) -> Report:
    removals = tuple(Removal(**{**each, "ref": CheckpointRef(**each["ref"])}) for each in answer["removals"])
    kept = tuple(Decision(**{**each, "ref": CheckpointRef(**each["ref"])}) for each in answer["kept"])
    return Report(removals, kept, bool(answer["is_complete"]))
