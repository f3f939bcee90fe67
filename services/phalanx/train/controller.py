"""One loop that carries every job on: snapshot -> decide -> commit.

What is decided is an event before anything follows from it, so a process that was killed anywhere goes on where its
events say. Opening an attempt waits for storage and so runs beside the loop; all else returns at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from phalanx.api.agent.v1 import record_pb2
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage.events import Cause, JobEvent, JobState
from phalanx.lineage.registry import JobName
from phalanx.rpc.tokens import Authority, Role
from phalanx.spec import Job as Spec
from phalanx.spec import parse_job
from phalanx.train.attempts import open_attempt
from phalanx.train.book import Book, Draft
from phalanx.train.deaths import Deaths, draft_of
from phalanx.train.decide import (
    Action,
    Agent,
    Decision,
    Open,
    Opened,
    Record,
    SendCheck,
    SendEnd,
    SendOrders,
    SendStart,
    Share,
    Situation,
    decide,
)
from phalanx.train.launch.base import Check, GangKey, GangState, Launcher, Node, StartGang, To
from phalanx.train.placement import Demand
from phalanx.train.replicas import NodeMemory
from phalanx.train.reports import commit_draft, damage_draft
from phalanx.train.shares import capacities, demand_of, order_of_start, prepared_demand, shares_of
from phalanx.train.states import ACTIVE, Intent, Job, Preparation, Start
from phalanx.train.turns import claimed_slots, in_turn

LOG = logging.getLogger(__name__)
TICK_S: Final = 0.5
MOST_EVENTS_A_LOOK: Final = 16
OPEN_AGAIN_S: Final = 2.0
STARTING_EVENTS: Final = ("opened", "progress", "step_time", "committed")


@dataclass(slots=True)
class _Run:
    """What this process knows of a job beside its events. since_s: when it saw the job's revision. stop_s, end_s: when
    it saw the wish to stop, and that ranks of the attempt are over. reported: the attempt whose ranks have told
    something. waits: what is waited for.
    """

    revision: int = -1
    since_s: float = 0.0
    stop: str = ""
    stop_s: float = 0.0
    ended: int = 0
    end_s: float = 0.0
    reported: int = 0
    opening: Future[Opened | Cause | None] | None = None
    opening_id: str = ""
    opened: Opened | Cause | None = None
    open_after_s: float = 0.0
    waits: str = ""
    spec_revision: Mapping[str, object] | None = None
    spec: Spec | None = None
    demand: Demand | None = None


class Controller:
    """Carries jobs on. agent_lost_s: how long an agent may be unheard, by this process's monotonic clock."""

    def __init__(
        self,
        book: Book,
        launcher: Launcher,
        authority: Authority,
        *,
        agent_lost_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book, self._launcher, self._authority = book, launcher, authority
        self._memory = NodeMemory(launcher, book)
        self._agent_lost_s, self._clock = agent_lost_s, clock
        self._is_over: Callable[[], bool] = lambda: False
        self._on_over: Callable[[], None] = lambda: None
        self._born_s = clock()
        self._runs: dict[JobName, _Run] = {}
        self._deaths = Deaths(clock)
        self._wake, self._is_stopped = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="open")
        self._thread = threading.Thread(target=self._loop, name="controller", daemon=True)

    # Around the loop.

    def start(self, is_over: Callable[[], bool], on_over: Callable[[], None]) -> None:
        """Begins. is_over: whether a later process acts instead of this one. on_over: called once when that is found;
        nothing is done any more then.
        """
        self._is_over, self._on_over = is_over, on_over
        self._thread.start()

    def close(self) -> None:
        """Ends the loop; gangs go on."""
        self._is_stopped.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def wake(self) -> None:
        """Something may be to be decided."""
        self._wake.set()

    def on_event(self, job: Job, event: JobEvent) -> None:
        """An event is in storage."""
        self._wake.set()

    def on_records(self, node_id: str, key: GangKey, records: Sequence[record_pb2.Record]) -> None:
        """Ranks of a node said something; commits are events before this returns. Raises what the book raises."""
        name = JobName.parse(key.job)
        job = self._book.find(name)
        if job is None or key.attempt != job.attempt:
            return
        for record in records:
            if record.WhichOneof("event") == "committed":
                self._book.change(name, partial(commit_draft, record.committed.attempt, record.committed.step))
            if record.WhichOneof("event") == "damaged":
                self._book.change(name, partial(damage_draft, record))
        if self._deaths.take(key, node_id, records):
            self._wake.set()
        if any(record.WhichOneof("event") in STARTING_EVENTS for record in records):
            self._run(name).reported = key.attempt
            if job.state is JobState.STARTING:
                self._wake.set()

    def waits(self, name: JobName) -> str:
        """What the job waits for, in one line."""
        run = self._runs.get(name)
        return run.waits if run is not None else ""

    def is_settled(self, key: GangKey) -> bool:
        """Whether what the end of that gang leads to is recorded."""
        job = self._book.find(JobName.parse(key.job))
        return job is None or not (job.is_live and job.attempt == key.attempt)

    def is_starting(self, key: GangKey) -> bool:
        """Whether it is still to be recorded that the attempt runs."""
        job = self._book.find(JobName.parse(key.job))
        return job is not None and job.state is JobState.STARTING and job.attempt == key.attempt

    # The loop.

    def _loop(self) -> None:
        while not self._is_stopped.is_set():
            self._wake.wait(self._deaths.until_due_s(TICK_S))
            self._wake.clear()
            if self._is_replaced():
                return
            try:
                self._tell_deaths()
                self._look_at_all()
            except Exception:
                LOG.exception("the loop goes on")

    def _look_at_all(self) -> None:
        for job in in_turn(self._book.jobs()):
            if self._is_stopped.is_set():
                return
            if job.state in ACTIVE or (job.state is JobState.SUSPENDED and job.intent is Intent.STOP):
                self._look(job.name)
        self._end_strangers()

    def _tell_deaths(self) -> None:
        for death in self._deaths.due():
            name = JobName.parse(death.key.job)
            try:
                self._book.change(name, partial(draft_of, death))
            except (OutsideError, PhalanxError) as error:
                LOG.warning("%s: the death of a rank is told with the end of its attempt only: %s", name, error)

    def _is_replaced(self) -> bool:
        try:
            is_over = self._is_over()
        except (OutsideError, PhalanxError) as error:
            LOG.warning("whether a later process acts is not known: %s", error)
            return False
        if is_over:
            LOG.error("a later train process acts on this storage; this one does nothing any more")
            self._on_over()
        return is_over

    def _look(self, name: JobName) -> None:
        run = self._run(name)
        try:
            self._reconcile(name, run)
        except OutsideError as error:
            run.waits = f"waits for storage: {error}"
            LOG.warning("%s %s", name, run.waits)
        except PhalanxError as error:
            run.waits = f"cannot go on: {error}"
            LOG.warning("%s %s", name, run.waits)
        except Exception:
            run.waits = "an error of the service holds it up; see its log"
            LOG.exception("%s is held up", name)

    def _run(self, name: JobName) -> _Run:
        return self._runs.setdefault(name, _Run())

    def _reconcile(self, name: JobName, run: _Run) -> None:
        for _ in range(MOST_EVENTS_A_LOOK):
            situation = self._situation(self._book.job(name), run)
            decision = decide(situation)
            run.waits = decision.waits or self._unheard(situation.job)
            record = next((action for action in decision.actions if isinstance(action, Record)), None)
            if record is None:
                self._carry_out(situation, run, decision)
                return
            self._commit(situation.job, record)
        self._wake.set()

    def _unheard(self, job: Job) -> str:
        """What is waited for while an agent of the job is silent."""
        placed = {each.node_id for each in job.placement}
        for node in self._launcher.nodes():
            if node.node_id in placed and not node.is_connected:
                return f"node {node.node_id} is not heard; given up after {self._agent_lost_s:g} s"
        return ""

    def _commit(self, seen: Job, record: Record) -> None:
        """Writes the event, unless the job is another one by now: then it is decided anew."""
        if self._is_over():
            return
        job = self._book.change(seen.name, lambda job: Draft(record) if job.revision == seen.revision else None)
        LOG.info("%s %s: %s, attempt %d %s", job.name, job.revision, job.state, job.attempt, job.message)
        if job.state is JobState.RUNNING and seen.state is not JobState.RUNNING:
            self._launcher.settle_start(GangKey(str(job.name), job.attempt))
        if seen.is_live and not (job.is_live and job.attempt == seen.attempt):
            self._deaths.settle(GangKey(str(seen.name), seen.attempt))
            self._launcher.settle(GangKey(str(seen.name), seen.attempt))
            if job.state not in ACTIVE:
                self._launcher.release(str(seen.name))

    # The snapshot.

    def _situation(self, job: Job, run: _Run) -> Situation:
        now_s, spec = self._clock(), self._spec(job, run)
        nodes, jobs = self._launcher.nodes(), self._book.jobs()
        self._note_times(job, run, now_s)
        shares: tuple[Share, ...] = ()
        check: Preparation | Cause | None = None
        lost = ""
        if job.start is not None and job.is_live:
            shares = shares_of(job, self._launcher, nodes, now_s - self._born_s, self._agent_lost_s)
            self._note_opening(job.start, run, now_s)
        if job.target is not None:
            check, lost = self._check(job, spec, nodes)
        if any(share.end is not None for share in shares):
            run.end_s = run.end_s if run.ended == job.attempt else now_s
            run.ended = job.attempt
        return Situation(
            job=job,
            demand=self._demand(job, spec, run),
            capacities=capacities(
                job, spec.cluster.device, nodes, jobs, claimed_slots(job, jobs, partial(self._waited_s, now_s))
            ),
            agents={node.node_id: Agent(node.node_id, node.instance_id) for node in nodes if node.is_connected},
            shares=shares,
            check=check,
            target_lost=lost,
            opened=run.opened,
            has_reported=run.reported == job.attempt,
            age_s=now_s - run.since_s,
            stopping_s=now_s - run.stop_s if job.stop_order else 0.0,
            ending_s=now_s - run.end_s if run.ended == job.attempt else 0.0,
            grace_s=spec.deadlines.grace_s,
            max_without_progress=spec.recovery.max_attempts_without_progress,
        )

    def _note_times(self, job: Job, run: _Run, now_s: float) -> None:
        if run.revision != job.revision:
            run.revision, run.since_s = job.revision, now_s
        if run.stop != job.stop_order:
            run.stop, run.stop_s = job.stop_order, now_s

    def _waited_s(self, now_s: float, job: Job) -> float:
        """Since the last decision about a job, as far as this process has seen it."""
        run = self._run(job.name)
        return now_s - run.since_s if run.revision == job.revision else 0.0

    def _spec(self, job: Job, run: _Run) -> Spec:
        if run.spec is None or run.spec_revision is not job.spec:
            run.spec, run.spec_revision, run.demand = parse_job(job.spec, where=str(job.name)), job.spec, None
        return run.spec

    def _demand(self, job: Job, spec: Spec, run: _Run) -> Demand:
        """What the job needs; of a layout that is chosen, what the node that checked the job chose, once it has."""
        if spec.parallel.layout == "auto" and job.preparation is not None:
            return prepared_demand(job.preparation)
        run.demand = run.demand or demand_of(spec)
        return run.demand

    def _check(self, job: Job, spec: Spec, nodes: Sequence[Node]) -> tuple[Preparation | Cause | None, str]:
        """The answer of the node that checks the job, and why there will be none."""
        assert job.target is not None
        node = next((each for each in nodes if each.node_id == job.target.node_id), None)
        silent_s = self._clock() - self._born_s if node is None else 0.0 if node.is_connected else node.silent_s
        if (node is not None and node.instance_id != job.target.instance_id) or silent_s > self._agent_lost_s:
            return None, f"{job.target.node_id} went away while it checked the job"
        if node is None or not node.is_connected:
            return None, ""
        to = To(job.target.node_id, job.target.instance_id)
        return self._launcher.check(to, job.target.order, self._asked_check(job, spec)), ""

    def _asked_check(self, job: Job, spec: Spec) -> Check:
        origin = job.registered.origin
        if origin is None:
            return Check(str(job.name), job.spec, spec.cluster.world_size)
        source = self._book.job(origin.name)
        told = {
            "job": str(origin.name),
            "storage": source.registered.storage,
            "attempt": origin.attempt,
            "step": origin.step,
            "spec_json": source.spec,
        }
        return Check(str(job.name), job.spec, spec.cluster.world_size, told)

    def _note_opening(self, start: Start, run: _Run, now_s: float) -> None:
        if run.opening_id != start.request_id:
            run.opening_id, run.opening, run.opened, run.open_after_s = start.request_id, None, None, 0.0
        if run.opening is None or not run.opening.done():
            return
        run.opened = run.opening.result()
        run.opening = None
        if run.opened is None:
            run.open_after_s = now_s + OPEN_AGAIN_S

    # What is decided.

    def _carry_out(self, situation: Situation, run: _Run, decision: Decision) -> None:
        for action in decision.actions:
            self._act(situation, run, action)

    def _act(self, situation: Situation, run: _Run, action: Action) -> None:
        job = situation.job
        key = GangKey(str(job.name), job.attempt)
        match action:
            case Open(start):
                self._open(job, start, run)
            case SendStart(assignment, rendezvous):
                assert job.start is not None and job.preparation is not None and isinstance(situation.opened, Opened)
                order = order_of_start(job.start, assignment.node_id)
                token = "" if self._launcher.was_sent(order) else self._token(job)
                gang = StartGang(
                    key,
                    assignment,
                    situation.demand.world_size,
                    job.preparation.arguments,
                    rendezvous,
                    situation.opened.parent,
                    token,
                    job.preparation.code_digest,
                    self._memory.partner(assignment.node_id, job.start),
                    self._memory.holders(key.job, situation.opened.parent, assignment.node_id),
                )
                self._launcher.start_gang(_to(job, assignment.node_id), order, gang)
            case SendOrders(node_id, order, stop, checkpoint):
                self._launcher.give_orders(_to(job, node_id), order, key, stop=stop, checkpoint=checkpoint)
            case SendEnd(node_id, order, grace_s, why):
                self._launcher.end_gang(_to(job, node_id), order, key, grace_s, why, superseded=False)
            case SendCheck() | Record():
                pass  # the check was asked for with the snapshot; records are committed

    def _token(self, job: Job) -> str:
        subject = f"{job.name}/attempts/{job.attempt}"
        return self._authority.mint(subject, Role.AGENT, job.name.project, job.name.uid, job.attempt)

    def _open(self, job: Job, start: Start, run: _Run) -> None:
        if run.opening is not None or self._clock() < run.open_after_s:
            return
        preparation, spec = job.preparation, run.spec
        assert preparation is not None and spec is not None
        windows, store = spec.training.global_batch_size, self._book.store(job.name)

        def opened() -> Opened | Cause | None:
            try:
                if spec.checkpoint.memory_interval:
                    self._memory.store_or_tell(job, start, spec.deadlines.save_s)
                return open_attempt(store, start, preparation, windows)
            except PhalanxError as error:
                return Cause("user_error", str(error))
            except OutsideError as error:
                LOG.warning("%s: attempt %d can't be opened yet: %s", job.name, start.attempt, error)
                return None
            finally:
                self._wake.set()

        run.opening = self._pool.submit(opened)

    def _end_strangers(self) -> None:
        """Ends the ranks of attempts that are over, wherever an agent came back with them."""
        for node in self._launcher.nodes():
            for gang in node.gangs:
                if not node.is_connected or gang.state is not GangState.RUNNING:
                    continue
                job = self._known(gang.key)
                if job is None or (job.is_live and job.attempt <= gang.key.attempt):
                    continue
                is_superseded = job.attempt > gang.key.attempt
                why = f"attempt {job.attempt} is the newest" if is_superseded else f"the job is {job.state}"
                order = f"stranger/{gang.key.job}/{gang.key.attempt}/{node.instance_id}"
                to = To(node.node_id, node.instance_id)
                self._launcher.end_gang(to, order, gang.key, 0.0, why, superseded=is_superseded)

    def _known(self, key: GangKey) -> Job | None:
        try:
            return self._book.find(JobName.parse(key.job))
        except (PhalanxError, OutsideError) as error:
            LOG.warning("gang of %s is left alone: %s", key.job, error)
            return None


def _to(job: Job, node_id: str) -> To:
    assert job.start is not None
    return To(node_id, job.start.instances[node_id])
