"""A file of JSON lines, one a step: `{"step": 7, "train/loss": 3.2}`; figures that are not finite are null.

The file is its own memory: opening it cuts off a line that a killed process left half written, and reads the newest
step.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.telemetry.sink import Values

_TAIL_BYTES = 1 << 20


class JsonLines:
    """`<folder>/metrics.jsonl`, appended to; each line goes to the system in one write."""

    name = "metrics.jsonl"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.name
        self._fd: int | None = None

    def open(self, run_id: str, config: Mapping[str, Any]) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return _repair_and_read_step(self._fd)

    def log(self, step: int, values: Values) -> None:
        assert self._fd is not None
        row = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        line = json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        written = os.write(self._fd, line)
        if written != len(line):  # a full disk; the next open cuts the piece off
            raise OSError(f"{self._path}: {written} of {len(line)} bytes written")

    def flush(self) -> None:
        assert self._fd is not None
        os.fsync(self._fd)

    def close(self) -> None:
        self.flush()
        assert self._fd is not None
        os.close(self._fd)


def _repair_and_read_step(fd: int) -> int:
    """Cut a half line off the end; the step of the last line, -1 in an empty file."""
    size = os.fstat(fd).st_size
    start = max(0, size - _TAIL_BYTES)
    tail = os.pread(fd, size - start, start)
    whole = tail[: tail.rfind(b"\n") + 1]
    os.ftruncate(fd, start + len(whole))
    lines = whole.splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else -1
