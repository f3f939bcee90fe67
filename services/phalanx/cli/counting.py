"""Shows how far a long question is: a bar for each thing that is counted on a terminal, a plain line every few seconds
elsewhere; nothing of one that is answered at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY_S = 5.0


class _Lines:
    """Where there is no terminal: says how far it is, every few seconds, from any thread."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._said_s, self._lock = clock(), threading.Lock()

    def say(self, what: str, done: int, total: int, unit: str = "") -> None:
        """Nothing on a terminal, or where something was said just now."""
        with self._lock:
            if self._console.is_terminal or self._clock() - self._said_s < LINE_EVERY_S:
                return
            self._said_s = self._clock()
        self._console.print(f"{what}: {done:,} of {total:,}{unit}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def counting(
    console: Console, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, int, int], None]]:
    """Gives what is to be called with what is counted, how many are done, and of how many. clock: seconds."""
    lines, tasks = _Lines(console, clock), dict[str, TaskID]()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def observe(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total)
            lines.say(what, done, total)

        yield observe


@contextmanager
def counting_bytes(
    console: Console, what: str, total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Gives what is to be called, from any thread, with each number of bytes done. clock: seconds."""
    lines = _Lines(console, clock)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task(what, total=total)

        def advance(num_bytes: int) -> None:
            bars.advance(task, num_bytes)
            lines.say(what, int(bars.tasks[0].completed), total, " bytes")

        yield advance
