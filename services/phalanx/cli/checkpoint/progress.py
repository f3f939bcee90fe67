"""How `checkpoint` commands show bytes and measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.checkpoint.report import CheckpointRow


@contextmanager
def bytes_done(what: str, total_bytes: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Gives what is to be called, from any thread, with each number of bytes done: shown on stderr as part of all, with
    the time left, so that stdout holds the answer alone. quiet: nothing is shown.
    """
    from rich.console import Console

    from phalanx.cli.counting import counting_bytes

    if quiet:
        yield lambda _: None
        return
    with counting_bytes(Console(stderr=True), what, total_bytes) as advance:
        yield advance


def size(num_bytes: int) -> str:
    """Bytes as a person reads them: 1.3 GB."""
    from rich.filesize import decimal

    return decimal(num_bytes)


def measured(row: CheckpointRow) -> str:
    """The metrics of a checkpoint: loss 2.31."""
    return ", ".join(f"{name} {value:.5g}" for name, value in sorted(row.metrics.items()))
