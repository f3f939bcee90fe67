"""What a node does: carries out train's orders, holds gangs, and tells what happens to them.

Every order is carried out in a thread of its own, once, and answered within its deadline. Killed: the ranks die with
this process, and the next agent of the node holds nothing, which train learns from its hello.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from phalanx.agent import records
from phalanx.agent.attempts import Attempt, Attempts
from phalanx.agent.ending import Killed
from phalanx.agent.exports import Exports
from phalanx.agent.facts import JobFacts
from phalanx.agent.gangs import GangKey, HeldGang
from phalanx.agent.log_bound import bound_logs
from phalanx.agent.outbox import Waiting
from phalanx.agent.servers import ForkServers
from phalanx.agent.slots import Slots
from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1 import record_pb2
from phalanx.api.agent.v1.rank_service_pb2 import RankOrder
from phalanx.core.errors import OutsideError
from phalanx.gang import Cause, Event, Gang, GangOrder, GangOutcome
from phalanx.gang.sections import Durations
from phalanx.rpc.errors import FailedPrecondition, Superseded

END_DEADLINE_S = 25.0  # beyond a grace: for SIGKILL, the fork server's end, the last events
Item = record_pb2.Record | pb.GangEnded
LOG = logging.getLogger(__name__)


class Node:
    """The gangs of this node. Safe from any thread.

    tell: takes what must reach train. folder: of the logs of ranks. exports: take the figures of rank 0. max_log_bytes:
    that those logs may take when a gang starts; 0: without bound.
    """

    def __init__(
        self,
        node_id: str,
        servers: ForkServers,
        slots: Slots,
        attempts: Attempts,
        folder: Path,
        tell: Callable[[Waiting[Item]], None],
        exports: Exports,
        max_log_bytes: int = 0,
    ) -> None:
        self.node_id, self.attempts = node_id, attempts
        self._servers, self._slots, self._folder, self._max_log_bytes = servers, slots, folder, max_log_bytes
        self._tell, self._exports = tell, exports
        self._lock = threading.Condition()
        self._starting: set[GangKey] = set()
        self._unwanted: set[GangKey] = set()
        self._is_stopping = False
        self._gangs: dict[GangKey, HeldGang] = {}
        self._ended: dict[GangKey, pb.HeldGang] = {}
        self._committed: dict[GangKey, set[int]] = {}
        self._past: dict[str, tuple[str, Mapping[str, Durations]]] = {}
        self._killed: list[Killed] = []

    def held(self) -> list[pb.HeldGang]:
        """The gangs that live here, and those whose end train has not acknowledged."""
        with self._lock:
            running = [
                pb.HeldGang(job=key.job, attempt=key.attempt, ranks=held.order.local_ranks, state=pb.GANG_STATE_RUNNING)
                for key, held in self._gangs.items()
            ]
            return [*self._ended.values(), *running]

    def log_folder(self, job: str, attempt: int) -> Path:
        """Where the ranks of an attempt write; 0 is the newest attempt that ran here."""
        folder = self._folder / job.removeprefix("projects/").replace("/jobs/", "/")
        if attempt:
            return folder / f"attempt-{attempt}"
        ran = sorted(folder.glob("attempt-*"), key=lambda path: int(path.name.partition("-")[2]))
        return ran[-1] if ran else folder

    def gang(self, key: GangKey) -> HeldGang | None:
        """The living gang of an attempt."""
        with self._lock:
            return self._gangs.get(key)

    def start(self, attempt: Attempt, order: GangOrder, code_digest: str, facts: JobFacts) -> HeldGang:
        """Starts the ranks of an attempt; those of an older one are ended first. Raises Superseded for an attempt that
        is not the newest here, PhalanxError and OutsideError where the gang can't start, or was not wanted any more by
        the time it did.
        """
        key = attempt.key
        with self._lock:
            if self._is_stopping:
                raise OutsideError(f"{key} does not start: this agent ends")
            if key in self._starting:
                raise FailedPrecondition(str(key), expected="not to be starting already", remedy="wait for it")
            self._starting.add(key)
        try:
            self._make_way(key)
            self._bound_logs()
            held = self._hold(attempt, self._forked(attempt, order, code_digest, facts), facts)
        finally:
            with self._lock:
                is_unwanted = key in self._unwanted or self._is_stopping
                self._starting.discard(key)
                self._unwanted.discard(key)
                self._lock.notify_all()
        if is_unwanted:
            held.end(0.0)
            self._await_end(held, 0.0)
            raise OutsideError(f"{key} was told to end before it had started")
        LOG.info("%s: ranks %s started (%s)", key, order.local_ranks, held.pids)
        return held

    def _forked(self, attempt: Attempt, order: GangOrder, code_digest: str, facts: JobFacts) -> Gang:
        key = attempt.key
        environ = self._slots.take(key, len(order.local_ranks))
        self.attempts.open(attempt)
        try:
            if 0 in order.local_ranks:
                self._exports.open(key, facts)
            order = replace(order, environ={**order.environ, **environ})
            return self._servers.start(key.job, code_digest, facts.own_code, order)
        except BaseException:
            self._let_go(key)
            raise

    def _hold(self, attempt: Attempt, gang: Gang, facts: JobFacts) -> HeldGang:
        key = attempt.key
        digest, past = self._past.get(key.job, ("", {}))
        known = past if digest == facts.digest else {}
        held = HeldGang(key, gang, self._on_event, self._on_end, known, facts)
        with self._lock:
            self._gangs[key] = held
            self._committed[key] = set()
        held.start()
        return held

    def _make_way(self, key: GangKey) -> None:
        with self._lock:
            others = [held for each, held in self._gangs.items() if each.job == key.job]
        for held in others:
            if held.key.attempt >= key.attempt:
                kind = FailedPrecondition if held.key == key else Superseded
                raise kind(str(key), expected=f"newer than {held.key}", remedy="nothing: the newest attempt goes on")
            self.supersede(held.key, f"attempt {key.attempt} starts")
            self._await_end(held, 0.0)

    def _bound_logs(self) -> None:
        if self._max_log_bytes:
            with self._lock:
                keys = [*self._gangs, *self._starting]
            bound_logs(self._folder, self._max_log_bytes, {self.log_folder(key.job, key.attempt) for key in keys})

    def end(self, key: GangKey, grace_s: float, because: Cause | None = None) -> None:
        """Ends the ranks of an attempt; returns when they are gone, or never come. Raises OutsideError where they don't
        go.
        """
        with self._lock:
            if key in self._starting:
                self._unwanted.add(key)
                return
        held = self.gang(key)
        if held is not None:
            held.end(grace_s, because)
            self._await_end(held, grace_s)

    def supersede(self, key: GangKey, why: str) -> None:
        """Begins to end the ranks of an attempt that is not the newest any more."""
        held = self.gang(key)
        if held is not None:
            LOG.warning("%s is superseded: %s; its ranks end", key, why)
            held.end(0.0, Cause("superseded", None, why))

    def _await_end(self, held: HeldGang, grace_s: float) -> None:
        if not held.wait_over(grace_s + END_DEADLINE_S):
            raise OutsideError(f"{held.key} did not end within {grace_s + END_DEADLINE_S:g} s")

    def give(self, key: GangKey, order: RankOrder.ValueType, signum: int) -> None:
        """Passes an order to the ranks: to rank 0 by its stream, where it lives here; else to all by a signal."""
        self.attempts.give(key, order)
        held = self.gang(key)
        if held is not None and 0 not in held.order.local_ranks:
            held.signal(signum)

    def committed(self, key: GangKey, step: int) -> None:
        """Tells that a checkpoint of the attempt exists; once, whoever knows it first."""
        self._put(key, Event(0, "committed", {"attempt": key.attempt, "step": step}, time.monotonic()))

    def release(self, job: str) -> None:
        """Ends whatever runs of a job, and its fork server."""
        with self._lock:
            keys = [key for key in self._gangs if key.job == job]
        for key in keys:
            self.end(key, 0.0)
        with self._lock:
            self._past.pop(job, None)
        self._servers.release(job)

    def stop(self, grace_of: Callable[[HeldGang], float]) -> None:
        """Has every gang commit and return, ends what is left after its grace; returns when no rank lives."""
        with self._lock:
            self._is_stopping = True
            gangs = list(self._gangs.values())
        for held in gangs:
            held.end(grace_of(held))
        for held in gangs:
            self._await_end(held, grace_of(held))
        self._exports.finish()

    def hurry(self) -> None:
        """Ends every gang at once, also one that was given a grace."""
        with self._lock:
            gangs = list(self._gangs.values())
        for held in gangs:
            held.end(0.0)

    @property
    def is_stopping(self) -> bool:
        """Whether nothing new begins here any more."""
        with self._lock:
            return self._is_stopping

    @property
    def killed(self) -> tuple[Killed, ...]:
        """The gangs that did not commit before the end of this agent."""
        with self._lock:
            return tuple(self._killed)

    @property
    def num_ranks(self) -> int:
        """Ranks of the gangs that live here."""
        with self._lock:
            return sum(len(held.order.local_ranks) for held in self._gangs.values())

    def acknowledged(self, key: GangKey, item: Item) -> None:
        """Train has what was told: the end of a gang need not be remembered."""
        if isinstance(item, pb.GangEnded):
            with self._lock:
                self._ended.pop(key, None)

    def _on_event(self, held: HeldGang, event: Event) -> None:
        self._put(held.key, event, held.started_s)
        self._exports.observe(held.key, event)

    def _put(self, key: GangKey, event: Event, started_s: float | None = None) -> None:
        held = self.gang(key)
        if started_s is None:
            started_s = held.started_s if held is not None else event.time_monotonic_s
        wall_s = time.time() - (time.monotonic() - event.time_monotonic_s)
        record = records.to_record(event, attempt=key.attempt, node=self.node_id, started_s=started_s, wall_s=wall_s)
        if record is None or self._is_known(key, record):
            return
        self._tell(Waiting(key.job, key.attempt, record, is_droppable=records.is_droppable(record)))

    def _is_known(self, key: GangKey, record: record_pb2.Record) -> bool:
        """Rank and agent may both tell of a commit."""
        if record.WhichOneof("event") != "committed":
            return False
        with self._lock:
            told = self._committed.setdefault(key, set())
            is_known = record.committed.step in told
            told.add(record.committed.step)
        return is_known

    def _on_end(self, held: HeldGang, outcome: GangOutcome) -> None:
        key = held.key
        with self._lock:
            committed = max(self._committed.pop(key, set()), default=0)
            ended = records.to_gang_ended(
                outcome, self.node_id, last_step=held.last_step, committed_step=max(committed, held.committed_step)
            )
            self._ended[key] = pb.HeldGang(
                job=key.job, attempt=key.attempt, ranks=held.order.local_ranks, state=ended.state
            )
            self._gangs.pop(key, None)
            if self._is_stopping and outcome.first_cause is not None and outcome.first_cause.kind == "interrupted":
                self._killed.append(Killed(key.job, key.attempt, ended.last_step, ended.committed_step))
            is_hang = outcome.first_cause is not None and outcome.first_cause.kind == "hang"
            self._past[key.job] = (held.facts.digest, {} if is_hang else held.past)  # learned anew after a hang
        self._let_go(key)
        self._tell(Waiting(key.job, key.attempt, ended, is_batched=False))
        LOG.info("%s ended: %s, %s", key, outcome.state, outcome.first_cause or "no cause")

    def _let_go(self, key: GangKey) -> None:
        self.attempts.close(key)
        self._slots.free(key)
        self._exports.close(key)


STOP_SIGNAL, CHECKPOINT_SIGNAL = signal.SIGTERM, signal.SIGUSR1
