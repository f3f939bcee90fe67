"""A bounded queue and one daemon thread between the step loop and a sink.

`put` takes a lock for a few instructions and never waits for the sink. Every row that was put ends in exactly one
count: logged, replayed (a step that the sink already has), dropped (queue full, sink failed) or waiting. A sink that
fails to open, or fails three times in a row, is off from then on, with one warning, unless it is one that comes back
(`sink.Returning`): that one is tried again, the row in hand first, for as long as it takes. A sink that hangs fills its
queue and loses rows, nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.telemetry.sink import Returning, Sink, Values

MAX_FAILURES_IN_A_ROW = 3
FIRST_PAUSE_S = 0.1
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows by their fate. failure: why the sink is off; empty: it is not."""

    logged: int
    replayed: int
    dropped: int
    waiting: int
    failure: str = ""

    @property
    def put(self) -> int:
        return self.logged + self.replayed + self.dropped + self.waiting


class SinkQueue:
    """One sink behind its queue; the thread starts at once and opens the sink."""

    def __init__(self, sink: Sink, run_id: str, config: Mapping[str, Any], capacity: int = 1024) -> None:
        self._sink, self._run_id, self._config, self._capacity = sink, run_id, config, capacity
        self._rows: deque[tuple[int, Values]] = deque()
        self._changed = threading.Condition()
        self._logged = self._replayed = self._dropped = self._in_hand = 0
        self._failure, self._high_water = "", -1
        self._flush_wanted = self._closing = False
        self._longest_pause_s = sink.longest_pause_s if isinstance(sink, Returning) else None
        self._thread = threading.Thread(target=self._run, name=f"sink-{sink.name}", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counts:
        with self._changed:
            waiting = len(self._rows) + self._in_hand
            return Counts(self._logged, self._replayed, self._dropped, waiting, self._failure)

    def put(self, step: int, values: Values) -> None:
        """Hand over one row; dropped, and counted, when the queue is full or the sink is off."""
        with self._changed:
            if self._failure or self._closing or len(self._rows) >= self._capacity:
                self._dropped += 1
                return
            self._rows.append((step, dict(values)))
            self._changed.notify_all()

    def flush(self, deadline_s: float) -> bool:
        """Wait until every row so far is logged and flushed; False when the deadline came first or the sink is off."""
        end_s = time.monotonic() + deadline_s
        with self._changed:
            self._flush_wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._flush_wanted or bool(self._failure), end_s - time.monotonic())
            return not self._flush_wanted and not self._failure

    def close(self, deadline_s: float) -> Counts:
        """Log what waits, close the sink, and end the thread; past the deadline the thread is abandoned and what waits
        is dropped.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._turn_off(f"did not close within {deadline_s:g} s")
        counts = self.counts
        if counts.dropped:
            LOG.warning("%s lost %d of %d rows", self._sink.name, counts.dropped, counts.put)
        return counts

    def _run(self) -> None:
        if not self._done("open", self._open):
            return
        failures = 0
        while (row := self._next_row()) is not None:
            failures = 0 if self._handle(row, failures) else failures + 1
            if self._failure and self._longest_pause_s is None:
                return
        self._attempt("close", self._sink.close, max_failures=1)

    def _open(self) -> None:
        self._high_water = self._sink.open(self._run_id, self._config)

    def _next_row(self) -> tuple[int, Values] | None:
        """The next row to log, flushing in between when asked; None at the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._flush_wanted or self._closing or self._failure)
                if self._failure:
                    return None
                if self._rows:
                    self._in_hand = 1
                    return self._rows.popleft()
                if not self._flush_wanted:
                    return None
            if not self._done("flush", self._sink.flush):
                return None
            with self._changed:
                self._flush_wanted = bool(self._rows)  # rows that came meanwhile are flushed too
                self._changed.notify_all()

    def _handle(self, row: tuple[int, Values], failures: int) -> bool:
        """Log one row unless the sink has its step; False when that failed."""
        step, values = row
        replayed = step <= self._high_water
        logged = not replayed and self._done(
            "log", lambda: self._sink.log(step, values), MAX_FAILURES_IN_A_ROW - failures
        )
        with self._changed:
            if self._in_hand:  # not given up meanwhile
                self._in_hand = 0
                self._logged += logged
                self._replayed += replayed
                self._dropped += not (logged or replayed)
            if logged:
                self._high_water = step
        return logged or replayed

    def _done(self, what: str, action: Callable[[], None], max_failures: int = 1) -> bool:
        """Whether `action` went well: at once, or at last for a sink that comes back."""
        if self._longest_pause_s is not None:
            return self._persist(what, action)
        return self._attempt(what, action, max_failures)

    def _persist(self, what: str, action: Callable[[], None]) -> bool:
        """Tries until `action` goes well; False where the queue is closed before. One warning when the sink goes away,
        one line when it is back.
        """
        assert self._longest_pause_s is not None
        failures = 0
        while True:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and tried again
                failures += 1
                if failures == 1:
                    LOG.warning("%s is away: %s failed: %s; it is tried again", self._sink.name, what, error)
                if self._waited(min(FIRST_PAUSE_S * 2 ** min(failures - 1, 16), self._longest_pause_s)):
                    self._turn_off(f"{what} failed: {type(error).__name__}: {error}")
                    return False
            else:
                if failures:
                    LOG.warning("%s is back; %d rows were dropped so far", self._sink.name, self.counts.dropped)
                return True

    def _waited(self, pause_s: float) -> bool:
        """Waits; True at once when the queue is closed or off."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or bool(self._failure), pause_s)

    def _attempt(self, what: str, action: Any, max_failures: int) -> bool:
        """Whether `action` went well; with no failure left the sink is turned off."""
        try:
            action()
        except Exception as error:
            LOG.warning("%s: %s failed", self._sink.name, what, exc_info=True)
            if max_failures <= 1:
                self._turn_off(f"{what} failed: {type(error).__name__}: {error}")
            return False
        return True

    def _turn_off(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._dropped += len(self._rows) + self._in_hand
            self._rows.clear()
            self._in_hand = 0
            self._changed.notify_all()
        LOG.warning("%s is off: %s", self._sink.name, reason)
