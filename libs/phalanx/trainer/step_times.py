"""How long each rank itself works on a step, so that a slow one among equals is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from phalanx.trainer.recorder import StepResult

EVERY_STEPS = 4
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def own_time_s() -> float:
    """Seconds that this thread has computed, or was ready to and waited for a core (Linux; elsewhere without those)."""
    try:
        ran_ns, waited_ns, _ = _SCHEDSTAT.read_bytes().split()
    except OSError:
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) * 1e-9


class StepTimes:
    """Reports `step_time` (step, step_time_s, busy_s, parts) of every EVERY_STEPS-th step; nothing where `report` is
    None.

    busy_s leaves out waiting for other ranks: it is the wait for data, the time in which the training thread computed
    in forward and backward (or wanted to, and had no core), and everything after the agreement of the ranks. What else
    the thread waited for in forward and backward (a lock, the disk, a sleep) counts as waiting for others. On a GPU the
    thread only gives orders there, so busy_s tells a slow host, and step_time_s alone a slow GPU.
    """

    def __init__(self, report: Callable[..., None] | None) -> None:
        self._report = report
        self._work_s = 0.0

    def _is_due(self, step: int) -> bool:
        return self._report is not None and step % EVERY_STEPS == 0

    @contextmanager
    def work(self, step: int) -> Iterator[None]:
        """Around forward and backward of a step."""
        if not self._is_due(step):
            yield
            return
        began_s = own_time_s()
        yield
        self._work_s = own_time_s() - began_s

    def tell(self, result: StepResult, after_agreement_s: float) -> None:
        """Reports a step, if it is one that is measured."""
        if self._report is not None and self._is_due(result.step):
            busy_s = result.parts.data_wait_s + self._work_s + after_agreement_s
            self._report(
                "step_time",
                step=result.step,
                step_time_s=result.step_time_s,
                busy_s=busy_s,
                parts=asdict(result.parts),
            )
