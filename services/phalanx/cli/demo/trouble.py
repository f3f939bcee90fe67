"""The trouble that the demo makes for its own run: a rank killed in the middle, an interruption at the end of the first
layout.
"""

from __future__ import annotations

import os
import signal
import time

from phalanx.gang import Event, Gang, StopSignals

VICTIM_RANK = 5
KILL_AFTER_STEP = 12
INTERRUPT_AFTER_STEP = 20


class Trouble:
    """Watches the events of the main job, strikes, and measures.

    recovery_s: from SIGKILL to the first step that the next attempt finished; ready_again_s: the part of it before that
    step began. progress: for each attempt the last step that it finished.
    """

    def __init__(self, stop: StopSignals) -> None:
        self._stop = stop
        self._gang: Gang | None = None
        self._killed_at_s: float | None = None
        self._attempt = self._killed_attempt = 0
        self.victim_pid: int | None = None
        self.recovery_s: float | None = None
        self.ready_again_s: float | None = None
        self.interrupted = False
        self.progress: dict[int, int] = {}

    def on_start(self, gang: Gang) -> None:
        """Each gang of the job as it starts."""
        self._gang = gang

    def observe(self, event: Event) -> None:
        """Each event of the job."""
        if event.kind == "opened" and event.rank == 0:
            self._attempt = int(event.fields["attempt"])
        elif (
            event.kind == "phase"
            and event.rank == 0
            and event.fields["name"] == "first_step"
            and self._is_next_attempt()
        ):
            self.ready_again_s = event.time_monotonic_s - (self._killed_at_s or 0.0)
        elif event.kind == "progress":
            self._after_step(int(event.fields["step"]), event.time_monotonic_s)

    def _after_step(self, step: int, now_s: float) -> None:
        self.progress[self._attempt] = step
        if self._killed_at_s is None and step >= KILL_AFTER_STEP:
            self._kill()
        elif self._is_next_attempt() and self.recovery_s is None:
            self.recovery_s = now_s - (self._killed_at_s or 0.0)
        if step >= INTERRUPT_AFTER_STEP and not self.interrupted:
            self.interrupted = True
            self._stop.request()

    def _kill(self) -> None:
        assert self._gang is not None
        self.victim_pid = self._gang.pids[VICTIM_RANK]
        self._killed_attempt = self._attempt
        self._killed_at_s = time.monotonic()
        os.kill(self.victim_pid, signal.SIGKILL)

    def _is_next_attempt(self) -> bool:
        return self._killed_at_s is not None and self._attempt == self._killed_attempt + 1
