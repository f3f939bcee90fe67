"""Shows how far a long question is: a bar for each thing that is counted on a terminal, a plain line every few seconds
elsewhere; nothing of one that is answered at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 5.0


@contextmanager
def counting(
    console: Console, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, int, int], None]]:
    """Gives what is to be called with what is counted, how many are done, and of how many. clock: seconds."""
    said_s, tasks = clock(), dict[str, TaskID]()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def observe(what: str, done: int, total: int) -> None:
            nonlocal said_s
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total)
            if not console.is_terminal and clock() - said_s >= LINE_EVERY_S:
                said_s = clock()
                console.print(f"{what}: {done:,} of {total:,}", markup=False, highlight=False, soft_wrap=True)

        yield observe
