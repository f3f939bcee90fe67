"""Shows a preparation to a person: a bar for each phase with documents and tokens a second, then a table of what came
out.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from phalanx.cli.output import print_table
from phalanx.data.prepare import Phase, PrepareReport, Progress

_TITLES = {Phase.TOKENIZER: "train tokenizer", Phase.SHARDS: "write shards"}


class PrepareDisplay:
    """A context manager that takes the progress of `prepare`; silent where the console is no terminal."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            DownloadColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rates]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[Phase, tuple[TaskID, float]] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def observe(self, progress: Progress) -> None:
        """Shows how far a phase is."""
        if progress.phase not in self._tasks:
            task = self._bars.add_task(_TITLES[progress.phase], total=progress.total_bytes, rates="")
            self._tasks[progress.phase] = task, time.monotonic()
        task, began = self._tasks[progress.phase]
        elapsed_s = max(time.monotonic() - began, 1e-3)
        rates = f"{progress.num_documents / elapsed_s:,.0f} documents/s"
        if progress.phase is Phase.SHARDS:
            rates += f"  {progress.num_tokens / elapsed_s:,.0f} tokens/s"
        self._bars.update(task, completed=progress.num_bytes, total=progress.total_bytes, rates=rates)


def print_report(console: Console, report: PrepareReport) -> None:
    """Prints the splits and the counts of what was dropped or mended."""
    rows = [
        (split.name, split.num_shards, split.num_documents, split.num_tokens, split.num_bytes, split.digest)
        for split in (report.train, report.held_out)
        if split is not None
    ]
    print_table(("split", "shards", "documents", "tokens", "bytes", "digest"), rows, console=console)
    console.print(
        f"vocabulary {report.vocab_size:,}; read {report.documents_read:,} documents, {report.bytes_read:,} bytes"
    )
    for name, count in report.counts.items():
        if count:
            console.print(f"{count:,} {name.replace('_', ' ')}")
    if report.held_out is None:
        console.print("no document fell into the held-out split: raise --held-out-fraction if you want one")
