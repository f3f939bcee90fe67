"""One run on one host: gang after gang until it is done, stopped, a user's error, or out of budget; nothing is left
running.

The first SIGINT, SIGTERM or SIGHUP asks the ranks to commit and return (they get SIGTERM), a second one or the end of
the grace kills them. Handlers only count; the loop looks at the count between two short waits, so no step of this code
can be torn by a signal.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from types import FrameType, TracebackType
from typing import Any, Self

from phalanx.gang.budget import Budget
from phalanx.gang.cause import Cause
from phalanx.gang.gang import Gang, GangOutcome
from phalanx.gang.order import Event
from phalanx.gang.watch import Watch

TICK_S = 0.1
STACKS_DEADLINE_S = 3.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Clock = Callable[[], float]
OnEvent = Callable[[Event], None]


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP (unless ignored: nohup) while entered, and puts the old handlers back. Outside
    the main thread it only counts `request`.
    """

    def __init__(self) -> None:
        self.count = 0
        self._old: dict[signal.Signals, Any] = {}

    def request(self) -> None:
        """Ask for a stop as a signal would."""
        self.count += 1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                    continue
                self._old[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        self._old.clear()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1


def supervise(
    start_attempt: Callable[[int], Gang],
    budget: Budget,
    on_event: OnEvent,
    clock: Clock = time.monotonic,
    *,
    stop_grace_s: float = 60.0,
    deadlines_off: bool = False,
    stop: StopSignals | None = None,
) -> GangOutcome:
    """Run attempts 0, 1, ... until one ends well, the user stops it, or no other is worth trying; the last gang's
    outcome.

    start_attempt: starts the gang of an attempt; what it raises ends the run. budget: see Budget; a rank's `committed`
    event is progress. on_event: gets every event of the ranks, and of the supervisor (rank None): `attempt` (number),
    `stopping`, `killing`, `incident` (the cause's fields, `retry`). clock: monotonic, as the ranks' own. stop_grace_s:
    from the first stop signal to the kill. deadlines_off: no hang is looked for. stop: entered by the caller already,
    to cover what lies around.
    """
    if stop is None:
        with StopSignals() as own:
            return supervise(
                start_attempt, budget, on_event, clock, stop_grace_s=stop_grace_s, deadlines_off=deadlines_off, stop=own
            )
    number = 0
    while True:
        if stop.count:
            return GangOutcome("stopped", Cause("interrupted", None, "stopped before an attempt began"), (), number)
        on_event(_own_event("attempt", {"number": number}, clock))
        attempt = _Attempt(start_attempt(number), on_event, clock, stop, stop_grace_s, deadlines_off)
        outcome = replace(attempt.run(), attempts=number + 1)
        if outcome.state != "failed":
            return outcome
        assert outcome.first_cause is not None
        budget = budget.after(committed=attempt.committed)
        retry = budget.allows_after(outcome.first_cause) and not stop.count
        on_event(_own_event("incident", {**asdict(outcome.first_cause), "retry": retry}, clock))
        if not retry:
            return outcome
        number += 1


def _own_event(kind: str, fields: Mapping[str, Any], clock: Clock) -> Event:
    return Event(None, kind, fields, clock())


class _Attempt:
    """One gang from its start to its end."""

    def __init__(
        self, gang: Gang, on_event: OnEvent, clock: Clock, stop: StopSignals, stop_grace_s: float, deadlines_off: bool
    ) -> None:
        self._gang, self._on_event, self._clock = gang, on_event, clock
        self._stop, self._stop_grace_s = stop, stop_grace_s
        self._watch = Watch(gang.order.world_size, ranks=gang.order.local_ranks, off=deadlines_off)
        self._kill_at_s: float | None = None
        self.committed = False

    def run(self) -> GangOutcome:
        """Until the gang is over; whatever is raised in between, no rank is left alive."""
        try:
            while not self._gang.over:
                self._take(TICK_S)
                if self._stop.count and self._follow_stop():
                    break
                if hang := self._find_hang():
                    return self._end(hang)
            return self._end(None)
        finally:
            if not self._gang.over:
                self._gang.end(0.0)

    def _take(self, timeout_s: float) -> None:
        for event in self._gang.events(timeout_s):
            self._watch.observe(event)
            self.committed |= event.kind == "committed"
            self._on_event(event)

    def _end(self, because: Cause | None) -> GangOutcome:
        outcome = self._gang.end(0.0, because)
        self._take(0.0)
        return outcome

    def _follow_stop(self) -> bool:
        """Pass the first stop on to the ranks; True when it is time to kill them."""
        now_s = self._clock()
        if self._kill_at_s is None:
            self._kill_at_s = now_s + self._stop_grace_s
            self._on_event(_own_event("stopping", {"grace_s": self._stop_grace_s}, self._clock))
            self._gang.signal(signal.SIGTERM)
        if self._stop.count < 2 and now_s < self._kill_at_s:
            return False
        self._on_event(_own_event("killing", {}, self._clock))
        return True

    def _find_hang(self) -> Cause | None:
        """The cause, when a rank is late and still is once the stacks are taken; never in a gang that is failing
        already.
        """
        if not self._watch.late(self._clock()):
            return None
        stacks = self._gang.stacks(STACKS_DEADLINE_S)
        self._take(0.0)
        now_s = self._clock()
        if self._gang.over or self._gang.failing or not self._watch.late(now_s):
            return None
        return self._watch.cause(now_s, stacks)
