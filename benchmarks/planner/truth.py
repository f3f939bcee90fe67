"""Rows of published measurements: loading them, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.planner.time import Configuration

from .fields import Row
from .rows import Read, read_row


@dataclass(frozen=True)
class Measured:
    """A row that can be scored: what was read of it, and seconds of its step."""

    row: Row
    read: Read
    step_s: float

    @property
    def config(self) -> Configuration:
        """Its configuration."""
        return self.read.config

    @property
    def source(self) -> str:
        """Who published it."""
        return str(self.row["source"])

    @property
    def kind(self) -> str:
        """Kind of its GPU."""
        return self.config.cluster.gpu.name.split("-")[0]


def load_rows(path: Path) -> Sequence[Row]:
    """The rows of a file `{"rows": [...]}`. Raises PhalanxError for a file that is not one."""
    expected = 'a JSON file {"rows": [...]}'
    try:
        rows = json.loads(path.read_text())["rows"]
    except OSError as cause:
        why = f"{cause.strerror}; name another file"
        raise PhalanxError("--rows", value=str(path), expected=expected, remedy=why) from cause
    except (ValueError, RecursionError) as cause:  # not text, not JSON, or nested without end
        raise PhalanxError("--rows", value=str(path), expected=expected, remedy=f"correct it: {cause}") from cause
    except (KeyError, TypeError) as cause:
        why = "write an object with rows"
        raise PhalanxError("--rows", value=str(path), expected=expected, remedy=why) from cause
    if not isinstance(rows, list):
        raise PhalanxError("--rows", value=str(path), expected="rows that are a list", remedy="write them as [...]")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or not _is_id(row.get("id")):
            raise PhalanxError(
                f"--rows {path}: rows[{number}]",
                expected="an object with an id, which is a text or a whole number",
                remedy="correct it",
            )
    return rows


def _is_id(given: object) -> bool:
    return isinstance(given, str | int) and not isinstance(given, bool) and given != ""


def step_seconds(row: Row) -> float | None:
    """Seconds of a step, as measured or as derived from it; None where neither is known."""
    measured, derived = row.get("measured") or {}, row.get("derived") or {}
    found = measured.get("step_time_s") or derived.get("step_time_s")
    return float(found) if found else None


def scored(rows: Sequence[Row]) -> list[Measured]:
    """The rows whose step time counts: complete (tier A or B), not marked as doubtful, on a GPU that is known."""
    found = []
    for row in rows:
        seconds = step_seconds(row)
        if row.get("category") != "step_time" or not row.get("score", True) or row.get("tier") == "C" or not seconds:
            continue
        try:
            found.append(Measured(row, read_row(row), seconds))
        except PhalanxError:
            # Counted by the caller: the table says how many of the file's rows were scored.
            continue
    return found


def memory_rows(rows: Sequence[Row]) -> list[tuple[Row, Read, dict[str, Any]]]:
    """Rows with a measured peak of memory, or that ran out of it."""
    found = []
    for row in rows:
        measured = dict(row.get("measured") or {})
        if row.get("score", True) and ("mem_gb" in measured or "oom" in measured):
            try:
                found.append((row, read_row(row), measured))
            except PhalanxError:
                continue
    return found
