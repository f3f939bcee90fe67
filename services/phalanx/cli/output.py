"""How every command prints what it found: one JSON object, or tables that look alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_WIDEST = 1 << 20  # characters in a line


def print_json(value: Mapping[str, Any]) -> None:
    """Writes `value` as one indented JSON object on standard output: keys as they are, no NaN."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None, console: Console | None = None
) -> None:
    """Prints rows below their columns, on standard output unless a console is given.

    Where a terminal is too narrow, long values go on in further lines; elsewhere each row is one line.
    Whole numbers get thousands separators, other numbers four digits, sequences commas; text is shown as it is.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    heading = None if title is None else Text(title)
    table = Table(title=heading, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    console = console or Console()
    if not console.is_terminal:
        natural = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
        console = Console(file=console.file, width=max(console.width, natural))
    console.print(table)


def print_facts(facts: Mapping[str, object], title: str, console: Console | None = None) -> None:
    """Prints names and values, one pair a line."""
    print_table(("what", "value"), facts.items(), title, console)


def _cell(value: object) -> Text:
    from rich.text import Text

    if isinstance(value, Text):
        return value
    if isinstance(value, bool) or value is None:
        return Text(str(value))
    if isinstance(value, int):
        return Text(f"{value:,}")
    if isinstance(value, float):
        return Text(f"{value:,.4g}")
    return Text(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))
