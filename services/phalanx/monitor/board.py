"""All runs behind one lock: records go in, incidents come of them, watchers are woken, changes are saved.

An incident is told to nobody before it is saved, together with the position of the record that shows it.
Steps are in memory for the runs used last; the others' are read from the database when somebody asks.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.monitor.attention import AttentiveClock
from phalanx.monitor.curve import PIECE_STEPS, Rows
from phalanx.monitor.incident import Incident, incident_of
from phalanx.monitor.rules import Action, Kind, Policy, Verdict
from phalanx.monitor.run import ENDED, Evaluated, Run, Summary
from phalanx.monitor.store import MonitorStore, Position, RunChange, StoredRun
from phalanx.rpc import NotFound

LOG = logging.getLogger(__name__)
VERSIONS_A_BOOT = 1 << 30
MAX_LOADED = 64
Result = TypeVar("Result")


class Board:
    """The runs that this monitor knows. on_new: called, outside of the lock, when there is an incident to be saved."""

    def __init__(self, store: MonitorStore, clock: AttentiveClock, on_new: Callable[[], None] = lambda: None) -> None:
        self.clock = clock
        self._store, self._on_new = store, on_new
        self._unsaved: list[tuple[Incident, bool]] = []
        self._changed = threading.Condition()
        self._saving = threading.Lock()
        self._first_version = store.next_boot() * VERSIONS_A_BOOT
        self._position = self._saved_position = store.position()
        self._num_missed = 0
        self._saved_events: dict[str, int] = {}
        self._runs = {each.summary.job: self._restored(each) for each in reversed(store.runs())}

    # What comes in.

    @property
    def position(self) -> Position:
        """How far the records were read."""
        with self._changed:
            return self._position

    @property
    def num_missed(self) -> int:
        """Records that this process knows to have missed."""
        with self._changed:
            return self._num_missed

    def observe(self, told: train_pb.WatchRecordsResponse) -> frozenset[str]:
        """Takes what train tells; the jobs of which records were missed before it, or may have been, as train's log is
        another one.
        """
        with self._noting():
            missed = self._advance(told)
            if told.HasField("event"):
                run = self._run(told.job)
                self._note(run, run.observe_event(told.event, time.monotonic()))
            elif told.HasField("record"):
                run = self._run(told.job)
                self._judge(run, run.observe(told.record, self.clock.now_s, time.monotonic()))
        return missed

    def judge_hangs(self, now_s: float, unheard: frozenset[str]) -> None:
        """Looks for ranks that are in a section too long, at `now_s` by the attentive clock."""
        with self._noting():
            for run in self._running():
                verdict = run.ranks.hang(run.summary.attempt, now_s, unheard)
                self._judge(run, () if verdict is None else (verdict,))

    def suspects_hang(self, now_s: float) -> bool:
        """Whether there would be a hang if all nodes were heard."""
        with self._changed:
            return any(run.ranks.hang(run.summary.attempt, now_s, frozenset()) for run in self._running())

    def running_nodes(self) -> frozenset[str]:
        """Where ranks of running jobs live; "" stands for those whose place is not known."""
        with self._changed:
            return frozenset(node for run in self._running() for node in run.ranks.nodes_with_ranks())

    def pause_nodes(self, nodes: frozenset[str], now_s: float) -> None:
        """These nodes are not heard: until now their ranks' time does not count."""
        with self._changed:
            for run in self._running():
                run.ranks.pause(nodes, now_s)

    def add_verdict(self, job: str, verdict: Verdict) -> None:
        """Takes a verdict that was found elsewhere. job: "" for none."""
        with self._noting():
            if job in self._runs:
                self._judge(self._runs[job], (verdict,))
            else:
                self._unsaved.append((incident_of("", verdict, Policy().action(verdict), time.time_ns()), False))

    def add_past(self, job: str, events: Sequence[train_pb.JobEvent]) -> None:
        """Takes events from storage; nobody is told of the incidents in them."""
        with self._noting():
            run = self._run(job)
            for event in events:
                self._note(run, run.observe_event(event, run.summary.heard_s), is_alerted=True)

    def put_incident(self, incident: Incident) -> None:
        """An incident that changed, or one from elsewhere."""
        with self._changed:
            if incident.job in self._runs:
                self._runs[incident.job].put_incident(incident)
                self._changed.notify_all()

    def change(self, job: str, act: Callable[[Run], Result]) -> Result:
        """`act` on a run, which is made where it is not known; watchers are woken."""
        with self._changed:
            result = act(self._run(job))
            self._changed.notify_all()
            return result

    def fill(self, job: str, rows: Rows) -> None:
        """Steps from storage, for those that are missing."""
        self.change(job, lambda run: run.fill(rows))

    # What goes out.

    def has_steps(self, job: str, first_step: int, last_step: int) -> bool:
        """Whether all of these steps of a run are there."""
        with self._changed:
            return job in self._runs and self._runs[job].curve.has_all(first_step, last_step)

    @contextmanager
    def reading(self, job: str) -> Iterator[Run]:
        """A run that nobody changes meanwhile. Raises NotFound."""
        with self._changed:
            if job not in self._runs:
                raise NotFound(
                    "job",
                    value=job,
                    expected="the name of a run that the monitor has heard of",
                    remedy="list the runs to see their names",
                )
            run = self._runs[job]
            run.used_s = time.monotonic()
            yield run

    def read_all(self, read: Callable[[Run], Result]) -> list[Result]:
        """`read` of each run, those that began last first, with nobody changing them meanwhile."""
        with self._changed:
            return [read(run) for run in reversed(self._runs.values())]

    def read_newest(self, max_runs: int, read: Callable[[Iterable[Run]], Result]) -> Result:
        """`read` of the runs heard last, with nobody changing them meanwhile."""
        with self._changed:
            return read(sorted(self._runs.values(), key=lambda run: run.summary.heard_s, reverse=True)[:max_runs])

    def jobs_on(self, node: str) -> list[str]:
        """The jobs that run there."""
        with self._changed:
            return [run.job for run in self._running() if node in run.ranks.nodes.values()]

    def watched(self, since_s: float) -> list[str]:
        """The runs that somebody has looked at since `since_s` by the monotonic clock."""
        with self._changed:
            return [run.job for run in self._runs.values() if run.used_s > since_s]

    def attempt_of(self, job: str) -> int:
        """The newest attempt of a run; 0 for one that is not known."""
        with self._changed:
            return self._runs[job].summary.attempt if job in self._runs else 0

    def wait(self, job: str, version: int, timeout_s: float) -> bool:
        """Waits until the run has a change after `version`; False when the time ran out first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: job in self._runs and self._runs[job].version > version, max(0.0, timeout_s)
            )

    # The database.

    def save(self) -> int:
        """Saves what changed; the number of incidents that are new by it. What could not be saved is tried again with
        the next one. Saves follow one another: an older state never overwrites a newer one.
        """
        with self._saving:
            return self._save()

    def _save(self) -> int:
        with self._changed:
            position, (incidents, self._unsaved) = self._position, (self._unsaved, [])
            changes = [self._taken(run) for run in self._runs.values() if run.is_unsaved]
            if not changes and not incidents and position == self._saved_position:
                return 0
        try:
            num_new = self._store.save(position, changes, incidents)
        except Exception:
            self._give_back(changes, incidents)
            raise
        with self._changed:
            self._saved_position = position
            for change in changes:
                events = [event.revision for event in change.run.events]
                job = change.run.summary.job
                self._saved_events[job] = max(events, default=self._saved_events.get(job, 0))
            self._unload()
        return num_new

    def prune(self, max_runs: int) -> None:
        """Forgets all but the runs heard last."""
        old = self._store.prune(max_runs)
        with self._changed:
            for job in old:
                self._runs.pop(job, None)

    # Below: with the lock held.

    def _run(self, job: str) -> Run:
        if job not in self._runs:
            self._runs[job] = Run(
                Summary(job), lambda: self._store.curve(job), self._first_version, self._first_version
            )
        return self._runs[job]

    def _restored(self, stored: StoredRun) -> Run:
        job, version = stored.summary.job, self._first_version + 1
        run = Run(replace(stored.summary, heard_s=time.monotonic()), lambda: self._store.curve(job), version, version)
        run.num_missed, run.attempts, run.attempts_version = stored.num_missed, dict(stored.attempts), version
        run.evaluations = {
            step: Evaluated(loss, metrics, version) for step, (loss, metrics) in stored.evaluations.items()
        }
        run.heat, run.heat_version = stored.heat, version
        run.events = {event.revision: (event, version) for event in stored.events}
        run.incidents = {each.id: (each, version) for each in stored.incidents}
        run.restored()
        self._saved_events[job] = max(run.events, default=0)
        return run

    def _advance(self, told: train_pb.WatchRecordsResponse) -> frozenset[str]:
        """Moves the position; what was missed on the way is counted."""
        is_other_log = self._position.log_id not in ("", told.log_id)
        before = self._position if self._position.log_id == told.log_id else Position(told.log_id, 0)
        is_sign_of_life = told.WhichOneof("message") is None
        missed = max(0, told.number - before.number - (0 if is_sign_of_life else 1))
        self._position = Position(told.log_id, max(told.number, before.number))
        if not missed and not is_other_log:
            return frozenset()
        self._num_missed += missed
        jobs = [run for run in self._runs.values() if run.summary.state not in ENDED] or list(self._runs.values())
        for run in jobs:
            run.num_missed += missed
            run.is_unsaved = True
        if missed:
            LOG.warning("missed %d records", missed)
        if is_other_log:
            LOG.warning("train began anew: what it told last may be missing")
        return frozenset(run.job for run in jobs)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        with self._changed:
            yield
            has_new = bool(self._unsaved)
            self._changed.notify_all()
        if has_new:
            self._on_new()

    def _running(self) -> list[Run]:
        return [run for run in self._runs.values() if run.summary.state == train_pb.JOB_STATE_RUNNING]

    def _judge(self, run: Run, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            run.ranks.mark(verdict)
            action = run.policy.action(verdict)
            if verdict.kind is Kind.NAN and action is Action.SKIP:  # those before it in the row were told one by one
                verdict = replace(verdict, first_step=verdict.last_step)
            self._note(run, (incident_of(run.job, verdict, action, time.time_ns()),))

    def _note(self, run: Run, incidents: Sequence[Incident], *, is_alerted: bool = False) -> None:
        """Those of the incidents that are not known."""
        for incident in incidents:
            if incident.id not in run.incidents:
                run.put_incident(incident)
                self._unsaved.append((incident, is_alerted))

    def _taken(self, run: Run) -> RunChange:
        run.is_unsaved = False
        saved = self._saved_events.get(run.job, 0)
        events = tuple(event for revision, (event, _) in sorted(run.events.items()) if revision > saved)
        evaluations = {step: (found.loss, found.metrics) for step, found in run.evaluations.items()}
        stored = StoredRun(_finite(run.summary), run.num_missed, dict(run.attempts), evaluations, events, heat=run.heat)
        taken = run.loaded.take_unsaved() if run.loaded is not None else None
        return RunChange(stored) if taken is None else RunChange(stored, *taken)

    def _give_back(self, changes: Sequence[RunChange], incidents: list[tuple[Incident, bool]]) -> None:
        with self._changed:
            self._unsaved = incidents + self._unsaved
            for change in changes:
                run = self._run(change.run.summary.job)
                run.is_unsaved = True
                if change.first_piece is not None:
                    run.curve.save_again(change.first_piece * PIECE_STEPS)

    def _unload(self) -> None:
        """Steps of runs that nobody used for longest leave memory."""
        loaded = [run for run in self._runs.values() if run.loaded is not None]
        spare = sorted(loaded, key=lambda run: max(run.used_s, run.summary.heard_s))[: max(0, len(loaded) - MAX_LOADED)]
        for run in spare:
            if run.loaded is not None and run.loaded.is_saved and not run.is_unsaved:
                run.unload()


def _finite(summary: Summary) -> Summary:
    """With None for what is not finite: databases have no such numbers."""
    loss, speed = summary.loss, summary.tokens_per_second
    return replace(
        summary,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        tokens_per_second=speed if speed is not None and math.isfinite(speed) else None,
    )
