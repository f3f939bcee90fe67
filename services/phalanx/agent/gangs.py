"""The gang of one attempt as this node holds it: a thread that takes its events, finds hangs and obeys what others ask
of it. The ranks of other nodes are not seen here.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace

from phalanx.agent.facts import JobFacts
from phalanx.core.errors import OutsideError
from phalanx.gang import Cause, Event, Gang, GangOutcome, Watch
from phalanx.gang.sections import Durations, Rule

TICK_S = 0.1
STACKS_DEADLINE_S = 3.0
NEXT_LOOK_S = 5.0  # after stacks that showed nobody to blame
TOLD_AGAIN_S = 300.0
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GangKey:
    """Which gang. job: `projects/<p>/jobs/<uid>`."""

    job: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.job} attempt {self.attempt}"


@dataclass(frozen=True, slots=True)
class Ask:
    """That the gang ends: SIGTERM, then SIGKILL at `kill_at_s` (monotonic). because: where whoever asks knows."""

    kill_at_s: float
    because: Cause | None = None


class HeldGang:
    """Holds a gang until it is over. Everything public is safe from any thread.

    on_event: each event of a rank. on_end: once, when the gang is over and all events are told; both are called in this
    gang's own thread. past: durations of the job's sections in earlier attempts. A job that does not end at a hang is
    told of it by an event of kind `hang`.
    """

    def __init__(
        self,
        key: GangKey,
        gang: Gang,
        on_event: Callable[[HeldGang, Event], None],
        on_end: Callable[[HeldGang, GangOutcome], None],
        past: Mapping[str, Durations],
        facts: JobFacts,
    ) -> None:
        self.key, self.order, self.pids, self.rendezvous = key, gang.order, dict(gang.pids), gang.rendezvous
        self.started_s = time.monotonic()
        self.last_step = self.committed_step = 0
        self.facts = facts
        self._gang, self._on_event, self._on_end = gang, on_event, on_end
        self._watch = Watch(gang.order.world_size, ranks=gang.order.local_ranks, rule=Rule(), past=past)
        self._lock = threading.Lock()
        self._ask: Ask | None = None
        self._terminated = False
        self._signals: list[int] = []
        self._wanted_stacks: list[Future[dict[int, str]]] = []
        self._next_look_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"gang-{key.attempt}", daemon=True)

    def start(self) -> None:
        """Begins to take events."""
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the gang has ended and that has been told."""
        return self._over.is_set()

    @property
    def past(self) -> Mapping[str, Durations]:
        """The durations of sections, for the watch of the next attempt; once the gang is over."""
        return self._watch.past

    def end(self, grace_s: float, because: Cause | None = None) -> None:
        """Asks the gang to end, within `grace_s` from now; a later wish may only shorten an earlier one. Returns at
        once.
        """
        ask = Ask(time.monotonic() + grace_s, because)
        with self._lock:
            if self._ask is not None:
                ask = Ask(min(self._ask.kill_at_s, ask.kill_at_s), self._ask.because or because)
            self._ask = ask

    def signal(self, signum: int) -> None:
        """Sends a signal to the ranks that live here."""
        with self._lock:
            self._signals.append(signum)

    def stacks(self, deadline_s: float) -> dict[int, str]:
        """The stacks of the living ranks. Raises OutsideError past the deadline."""
        wanted: Future[dict[int, str]] = Future()
        with self._lock:
            self._wanted_stacks.append(wanted)
        try:
            return {} if self._over.is_set() else wanted.result(deadline_s)
        except TimeoutError as error:
            raise OutsideError(f"no stacks of {self.key} within {deadline_s:g} s") from error

    def wait_over(self, deadline_s: float) -> bool:
        """Whether the gang is over, at the latest after `deadline_s`."""
        return self._over.wait(deadline_s)

    def _run(self) -> None:
        try:
            outcome = self._until_over()
        except Exception as error:
            LOG.exception("%s", self.key)
            outcome = self._ended_by(Cause("error", None, f"the agent: {type(error).__name__}: {error}"))
        try:
            self._on_end(self, outcome)
        finally:
            self._over.set()
            self._answer_stacks({})

    def _ended_by(self, because: Cause) -> GangOutcome:
        try:
            return self._gang.end(0.0, because)
        except OutsideError as error:
            LOG.error("%s: %s", self.key, error)
            return GangOutcome("failed", because, ())

    def _until_over(self) -> GangOutcome:
        because: Cause | None = None
        while not self._gang.over:
            self._take(TICK_S)
            self._pass_signals()
            if self._is_time_to_kill():
                because = self._ask.because if self._ask is not None else None
                break
            self._answer_asked_stacks()
            because = self._find_hang()
            if because is not None and self.facts.ends_at_hang:
                break
            if because is not None:
                self._on_event(self, Event(because.rank, "hang", asdict(because), time.monotonic()))
                self._next_look_s = time.monotonic() + TOLD_AGAIN_S
        outcome = self._gang.end(0.0, because)
        self._take(0.0)
        ask = self._ask
        if ask is not None and ask.because is not None and outcome.state != "ok":
            outcome = replace(outcome, first_cause=ask.because)
        return outcome

    def _take(self, timeout_s: float) -> None:
        for event in self._gang.events(timeout_s):
            self._watch.observe(event)
            if event.kind in ("progress", "overflow", "finished", "stopped"):
                self.last_step = max(self.last_step, int(event.fields["step"]))
            if event.kind == "committed":
                self.committed_step = max(self.committed_step, int(event.fields["step"]))
            self._on_event(self, event)

    def _pass_signals(self) -> None:
        with self._lock:
            signals, self._signals = self._signals, []
        for signum in signals:
            self._gang.signal(signum)

    def _is_time_to_kill(self) -> bool:
        """Passes a wish to end on to the ranks; True when the grace is over."""
        ask = self._ask
        if ask is None:
            return False
        if time.monotonic() >= ask.kill_at_s:
            return True
        if not self._terminated:
            self._terminated = True
            self._gang.signal(signal.SIGTERM)
        return False

    def _answer_asked_stacks(self) -> None:
        with self._lock:
            is_wanted = bool(self._wanted_stacks)
        if is_wanted:
            self._answer_stacks(self._gang.stacks(STACKS_DEADLINE_S))

    def _answer_stacks(self, stacks: dict[int, str]) -> None:
        with self._lock:
            wanted, self._wanted_stacks = self._wanted_stacks, []
        for each in wanted:
            each.set_result(stacks)

    def _find_hang(self) -> Cause | None:
        """The cause, when a rank of this node is late, still is once the stacks are taken, and waits for no other
        node's; never in a gang that is failing already.
        """
        now_s = time.monotonic()
        if now_s < self._next_look_s or not self._watch.late(now_s):
            return None
        stacks = self._gang.stacks(STACKS_DEADLINE_S)
        self._take(0.0)
        now_s = time.monotonic()
        self._next_look_s = now_s + NEXT_LOOK_S
        if self._gang.over or self._gang.failing:
            return None
        return self._watch.verdict(now_s, stacks)
