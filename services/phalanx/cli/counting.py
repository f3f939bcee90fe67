"""Shows how far a long question is: a bar for each thing that is counted on a terminal, a plain line every few seconds
elsewhere; nothing of one that is answered at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 5.0


class Counting:
    """A context manager that hears what is counted. clock: seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock, self._said_s = console, clock, clock()
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def observe(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` are done."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what)
        self._bars.update(self._tasks[what], completed=done, total=total)
        now = self._clock()
        if not self._console.is_terminal and now - self._said_s >= LINE_EVERY_S:
            self._said_s = now
            self._console.print(f"{what}: {done:,} of {total:,}", markup=False, highlight=False, soft_wrap=True)
