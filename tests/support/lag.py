"""How long a busy machine held this process up, so that a bound in seconds can be as tight as on an idle one."""

from __future__ import annotations

import threading
import time
from typing import Self

TICK_S = 0.01


class Lag:
    """While entered, a thread wakes every 10 ms; `total_s` is by how much it woke too late in all."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def _measure(self) -> None:
        while True:
            began_s = time.monotonic()
            is_over = self._over.wait(TICK_S)
            self.total_s += max(0.0, time.monotonic() - began_s - TICK_S)
            if is_over:
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
