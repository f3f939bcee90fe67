"""Shows a preparation to a person: a bar for each phase with documents and tokens a second on a terminal, a plain line
every few seconds elsewhere; then a table of what came out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from phalanx.cli.output import print_table
from phalanx.data.prepare import PartReport, Phase, PrepareReport, Progress

_TITLES = {Phase.TOKENIZER: "train tokenizer", Phase.CHUNKS: "tokenize", Phase.SHARDS: "write shards"}
_LINE_EVERY_S = 5.0
_WHOLE_FROM = 10  # slower rates are shown with a decimal


@dataclass(slots=True)
class _Begun:
    """A phase as it began. first_bytes: what earlier starts had done. said_s: when the last line was printed."""

    task: TaskID
    began_s: float
    first_bytes: int
    said_s: float


class PrepareDisplay:
    """A context manager that takes the progress of a preparation.

    clock: seconds. chunks: what making chunks is called.
    """

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, chunks: str = _TITLES[Phase.CHUNKS]
    ) -> None:
        self._console, self._clock, self._titles = console, clock, {**_TITLES, Phase.CHUNKS: chunks}
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
        self._phases: dict[Phase, _Begun] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def observe(self, progress: Progress) -> None:
        """Shows how far a phase is."""
        now = self._clock()
        if progress.phase not in self._phases:
            total, done = progress.total_bytes, progress.num_bytes
            task = self._bars.add_task(self._titles[progress.phase], total=total, completed=done, rates="")
            self._phases[progress.phase] = _Begun(task, now, done, now)
        begun = self._phases[progress.phase]
        elapsed_s = max(now - begun.began_s, 1e-3)
        rates = _rates(progress, elapsed_s)
        self._bars.update(begun.task, completed=progress.num_bytes, total=progress.total_bytes, rates=rates)
        if not self._console.is_terminal and now - begun.said_s >= _LINE_EVERY_S:
            begun.said_s = now
            self._console.print(
                f"{self._titles[progress.phase]}: {progress.num_bytes / max(progress.total_bytes, 1):.1%} of "
                f"{progress.total_bytes / 1e6:,.1f} MB  {rates}{_left(progress, begun.first_bytes, elapsed_s)}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def _rates(progress: Progress, elapsed_s: float) -> str:
    """Documents and tokens a second, where they are known."""
    counted = ((progress.num_documents, "documents"), (progress.num_tokens, "tokens"))
    rates = ((number / elapsed_s, what) for number, what in counted if number)
    return "  ".join(f"{rate:,.{0 if rate >= _WHOLE_FROM else 1}f} {what}/s" for rate, what in rates)


def _left(progress: Progress, first_bytes: int, elapsed_s: float) -> str:
    done = progress.num_bytes - first_bytes
    if done <= 0:
        return ""
    left_s = round((progress.total_bytes - progress.num_bytes) * elapsed_s / done)
    return f"  {left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left"


def print_report(console: Console, report: PrepareReport, *, expects_held_out: bool = True) -> None:
    """Prints the splits, and what was dropped or mended, with an example of each; expects_held_out: says where there is
    no held-out split.
    """
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
            examples = report.examples.get(name, ())
            shown = f", as {examples[0]!r}" if examples else ""
            console.print(f"{count:,} {name.replace('_', ' ')}{shown}", markup=False, highlight=False, soft_wrap=True)
    if report.held_out is None and expects_held_out:
        console.print("no document fell into the held-out split: raise --held-out-fraction if you want one")


def print_left_out(console: Console, left_out: Mapping[str, int]) -> None:
    """Says how many files of the inputs' folders are of no kind that is read, so that none is missed unsaid."""
    if left_out:
        kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in left_out.items())
        console.print(f"files left out: {kinds}", markup=False, highlight=False, soft_wrap=True)


def print_part(console: Console, report: PartReport) -> None:
    """Prints what one part did, and what comes next."""
    if report.is_finished:
        text = f"{report.url} is finished already: nothing left to do"
    else:
        text = (
            f"part {report.part}/{report.parts}: {report.pieces_made:,} of its {report.pieces_of_part:,} pieces made "
            f"now ({report.documents_read:,} documents, {report.num_tokens:,} tokens); once all parts are done: "
            f"phalanx data merge --out {report.url}"
        )
    console.print(text, markup=False, highlight=False, soft_wrap=True)
