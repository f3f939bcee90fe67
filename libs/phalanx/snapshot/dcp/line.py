"""The line in which the saves of a process at one URL stand: in the order in which they were called, one at a time.

torch runs a background save in a thread of its own, and chance says which of two threads comes first. So a save's turn
is taken in the thread that calls it, where torch asks the writer there (`PhalanxWriter.stage`), and before a save does
anything it waits for the turns before it. Saves of several ranks need that too: two at once on one process group would
mix up their messages.

torch tells a writer when a save succeeds, but not when it fails on another rank or in the planner, nor when it never
runs. So a turn also ends with whatever shows that its save is over: the end of the thread that ran it, the end of its
writer, the next call from the thread that ran it.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque

from phalanx.core.errors import OutsideError


class Turn:
    """One save's. place: in the line. order: among the calls. taken_by: the thread that took it."""

    def __init__(self, place: int, order: int) -> None:
        self.place, self.order, self.taken_by = place, order, threading.get_ident()
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()  # an event that a finalizer may set at any point

    def end(self) -> None:
        """The save is over, well or badly; again does nothing."""
        self._over.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Whether it was over within `timeout_s`."""
        try:
            self._over.get(timeout=timeout_s)
        except queue.Empty:
            return False
        self._over.put(None)  # for whoever else waits
        return True


class Hold:
    """Ends the turn when it is dropped itself: by a writer, or by a thread."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn

    def __del__(self) -> None:
        self.turn.end()


class Line:
    """Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders = itertools.count(1)
        self._turns: deque[Turn] = deque()
        self._ran_here = threading.local()  # .hold: of the save that this thread runs, or ran last

    def next_order(self) -> int:
        """A place in the order of calls, for something that is no save."""
        with self._lock:
            return next(self._orders)

    def take(self, order: int | None = None) -> Hold:
        """The next turn, for a save that this thread calls. order: its place in the order of calls, if it has one
        already. Whatever this thread ran before is over: it would not be here otherwise.
        """
        self._ran_here.hold = None
        with self._lock:
            place = next(self._orders)
            turn = Turn(place, place if order is None else order)
            self._turns.append(turn)
        return Hold(turn)

    def enter(self, turn: Turn) -> None:
        """This thread runs the save of `turn`, which ends with the thread at the latest."""
        self._ran_here.hold = Hold(turn)

    def wait_for(self, turn: Turn, timeout_s: float) -> None:
        """Waits in a thread that calls until a save is over. Raises OutsideError past `timeout_s`, once: the save does
        not count after that.
        """
        self._ran_here.hold = None
        self._require_over(turn, timeout_s)

    def wait_for_those_before(self, turn: Turn, timeout_s: float) -> None:
        """Waits until every save before `turn` is over. Raises OutsideError where one of them takes longer than
        `timeout_s`; that one does not count after that.
        """
        while (first := self._first_before(turn)) is not None:
            self._require_over(first, timeout_s)
            self._drop(first)

    def _first_before(self, turn: Turn) -> Turn | None:
        with self._lock:
            return self._turns[0] if self._turns and self._turns[0].place < turn.place else None

    def _drop(self, turn: Turn) -> None:
        with self._lock:
            if self._turns and self._turns[0] is turn:
                self._turns.popleft()

    @staticmethod
    def _require_over(turn: Turn, timeout_s: float) -> None:
        if not turn.wait(timeout_s):
            turn.end()
            raise OutsideError(f"the save before this one was not over within {timeout_s:g} s")
