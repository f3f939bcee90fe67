"""How long a rank that sees no peers may stay in a phase, and what happens then."""

from __future__ import annotations

import subprocess
import sys

from phalanx.trainer.watchdog import next_limit

PROGRAM = """
import sys, threading
from phalanx.trainer.watchdog import Watchdog

def doze_off(watchdog):
    watchdog.report("phase", name="step", step=7, deadline_s=0.2)
    threading.Event().wait(float(sys.argv[1]))

with Watchdog(3) as watchdog:
    watchdog.report("progress", step=6)
    watchdog.report("phase", name="step", step=6, deadline_s=0.2)
    doze_off(watchdog)
"""


def run(sleep_s: float) -> subprocess.CompletedProcess[str]:
    """A process that sleeps in a phase whose limit is 0.4 s."""
    command = [sys.executable, "-c", PROGRAM, str(sleep_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_limit_allows_for_a_peer_that_is_still_in_the_phase_before() -> None:
    first = next_limit(None, "init", 0, 120.0, 5.0)
    assert (first.since_s, first.limit_s) == (5.0, 120.0)
    save = next_limit(next_limit(first, "step", 1, 3.0, 6.0), "save", 1, 600.0, 7.0)
    assert save.limit_s == 603.0
    step = next_limit(save, "step", 2, 3.0, 8.0)
    assert step.limit_s == 603.0 and next_limit(step, "step", 3, 3.0, 9.0).limit_s == 6.0


def test_rank_past_its_limit_ends_with_its_stack() -> None:
    ended = run(600.0)
    assert ended.returncode == 1
    assert ended.stderr.startswith("phalanx: hang of rank 3: in phase 'step' of step 7 for 0.4")
    assert "in doze_off" in ended.stderr


def test_rank_that_leaves_in_time_is_let_go() -> None:
    ended = run(0.0)
    assert (ended.returncode, ended.stderr) == (0, "")
