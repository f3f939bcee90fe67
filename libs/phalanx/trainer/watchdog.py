"""Ends a rank that hangs under torchrun, where nobody watches phases from outside: stacks on stderr, exit code 1.

The launcher ends all ranks once one has ended. So that the one to blame gets to speak, a rank that waits for its peers
in a collective gives them `PEERS_S` more.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from phalanx.gang.watch import Frame, waits_in_collective

EXIT_CODE = 1
STDERR_FD = 2
DUMP_DEADLINE_S = 5.0
PEERS_S = 5.0


@dataclass(frozen=True, slots=True)
class Limit:
    """The phase that a rank is in. since_s: monotonic. limit_s: from then until the rank is taken for hung.
    is_extended: whether its peers were given more time.
    """

    name: str
    step: int
    since_s: float
    deadline_s: float
    limit_s: float
    is_extended: bool = False


def next_limit(before: Limit | None, name: str, step: int, deadline_s: float, now_s: float) -> Limit:
    """The limit of a phase that begins at `now_s`.

    A rank cannot see its peers. One for which it waits may still be in the phase before (a save that takes its time),
    so the deadline of that one is added.
    """
    return Limit(name, step, now_s, deadline_s, deadline_s + (before.deadline_s if before is not None else 0.0))


class Watchdog:
    """A context manager with a thread; `report` takes what the rank reports."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._limit: Limit | None = None
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def report(self, kind: str, /, **fields: Any) -> None:
        """One event of this rank; a phase begins its own time."""
        if kind == "phase":
            with self._changed:
                self._limit = next_limit(
                    self._limit, fields["name"], fields["step"], fields["deadline_s"], time.monotonic()
                )
                self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                limit = self._limit
                left_s = None if limit is None else limit.since_s + limit.limit_s - time.monotonic()
                if limit is not None and left_s is not None and left_s <= 0:
                    if not limit.is_extended and waits_in_collective(main_thread_stack()):
                        self._limit = replace(limit, limit_s=limit.limit_s + PEERS_S, is_extended=True)
                        continue
                    self._end(limit)
                self._changed.wait(left_s)

    def _end(self, limit: Limit) -> None:
        faulthandler.dump_traceback_later(DUMP_DEADLINE_S, exit=True)  # a stream that nobody reads holds nothing up
        more = "that of the phase before, in which a peer may still be"
        if limit.is_extended:
            more += f", and {PEERS_S:g} s for its peers, for which it waits in a collective"
        text = (
            f"phalanx: hang of rank {self._rank}: in phase {limit.name!r} of step {limit.step} "
            f"for {time.monotonic() - limit.since_s:.1f} s (its deadline: {limit.deadline_s:g} s, "
            f"{limit.limit_s:g} s with {more})\n"
        )
        os.write(STDERR_FD, text.encode())
        faulthandler.dump_traceback(STDERR_FD, all_threads=True)
        os._exit(EXIT_CODE)


def main_thread_stack() -> tuple[Frame, ...]:
    """The main thread's Python frames, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = traceback.extract_stack(frame) if frame is not None else []
    return tuple(Frame(each.filename, each.lineno or 0, each.name) for each in reversed(found))
