"""How `checkpoint` commands show bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def progress_of_bytes(*, quiet: bool) -> Progress:
    """A bar of bytes on stderr, so that stdout holds the answer alone."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=quiet)


def size(num_bytes: int) -> str:
    """Bytes as a person reads them: 1.3 GB."""
    from rich.filesize import decimal

    return decimal(num_bytes)
