"""`phalanx run --debug-rank`: a rank gets the terminal and pdb, and the run goes on when it is let go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.jobs import PHALANX, Command, assert_proven, write_job

IN_A_TERMINAL = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"


def test_debug_rank_stops_in_pdb_on_the_terminal_and_the_run_ends_well(corpus: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus, steps=4, more="[deadlines]\nfirst_step_s = 1\nstep_s = 1\n")
    launched = [sys.executable, "-c", IN_A_TERMINAL, PHALANX, "run", path, "--debug-rank", "1"]
    with Command(launched, stdin=subprocess.PIPE) as command:
        command.wait_for("ALL DEADLINES ARE OFF", stream="out")
        command.wait_for("loop.py", stream="out")
        command.type("p 'rank', session.rank\n")
        command.wait_for("('rank', 1)", stream="out")
        command.type("c\n")
        finished = command.finish()
        command.wait_until_nothing_lives()
    assert finished.code == 0, finished.out
    assert_proven(path, 4)
