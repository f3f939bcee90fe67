"""A clock that runs only while the monitor hears what it judges by.

It stands still while the stream from train is away, and makes up for no pause of this process (SIGSTOP, a machine that
slept): what arrives late must not look as if it had taken long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LONGEST_TICK_S = 1.0


class AttentiveClock:
    """`tick` moves it; safe for several threads. read_s: a monotonic clock."""

    def __init__(self, read_s: Callable[[], float] = time.monotonic) -> None:
        self._read_s = read_s
        self._lock = threading.Lock()
        self._last_s = read_s()
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        """Seconds of attention so far."""
        with self._lock:
            return self._now_s

    def tick(self, is_listening: bool) -> float:
        """Moves on by the time since the last tick, `LONGEST_TICK_S` at most, or not at all; the new time."""
        with self._lock:
            passed_s, self._last_s = self._read_s() - self._last_s, self._read_s()
            if is_listening:
                self._now_s += min(passed_s, LONGEST_TICK_S)
            return self._now_s
