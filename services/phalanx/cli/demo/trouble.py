"""The trouble that the demo makes for its own run: SIGKILL to a rank, to each service and to the agent, and a stop in
between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.cli.demo.cluster import Cluster
from phalanx.train.values import JobView

RANK, AGENT = "a rank", "agent"
BEFORE_STOP = {4: "data", 7: "checkpoint", 12: RANK, 16: "train", 18: "monitor"}
AFTER_RESUME = {27: AGENT}
STOP_AFTER_STEP = 20


@dataclass(slots=True)
class Recovery:
    """From SIGKILL to what came after it, in seconds."""

    attempt: int
    killed_at_s: float
    running_s: float | None = None
    first_step_s: float | None = None

    def observe(self, job: JobView) -> None:
        """Takes the job as it is now."""
        if job.attempt <= self.attempt or job.state.value != "running":
            return
        now_s = time.monotonic() - self.killed_at_s
        if self.running_s is None:
            self.running_s = now_s
        if self.first_step_s is None and job.loss is not None:
            self.first_step_s = now_s


class Trouble:
    """Strikes as the main job reaches its steps, and measures. progress: for each attempt the last step that was seen
    finished.
    """

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cluster, self._say = cluster, say
        self._due = dict(BEFORE_STOP)
        self.recoveries: dict[str, Recovery] = {}
        self.progress: dict[int, int] = {}

    def observe(self, job: JobView) -> None:
        """The job as it is now; strikes where it is due and no earlier strike is still being recovered from. Only an
        attempt's own steps come with a loss.
        """
        if job.loss is not None:
            self.progress[job.attempt] = max(job.step, self.progress.get(job.attempt, 0))
        for recovery in self.recoveries.values():
            recovery.observe(job)
        is_recovering = any(each.first_step_s is None for each in self.recoveries.values())
        due = [step for step in self._due if job.step >= step]
        if due and job.state.value == "running" and not is_recovering:
            self._strike(self._due.pop(due[0]), job)

    def resume(self) -> None:
        """The second layout begins."""
        self._due = dict(AFTER_RESUME)

    @property
    def num_left(self) -> int:
        """Strikes of this layout that have not come yet."""
        return len(self._due)

    def _strike(self, victim: str, job: JobView) -> None:
        pid = self._cluster.kill_rank() if victim == RANK else self._cluster.kill(victim)
        if victim in (RANK, AGENT):
            self.recoveries[victim] = Recovery(job.attempt, time.monotonic())
        self._say(f"SIGKILL to {victim if victim == RANK else 'the ' + victim} (pid {pid}) at step {job.step}")
