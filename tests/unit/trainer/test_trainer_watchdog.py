"""How long a rank that sees no peers may stay in a phase, and what happens then."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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

COLLECTIVE = """
import sys, threading
import torch.distributed as dist
from phalanx.trainer.watchdog import Watchdog

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
dist.barrier()
with Watchdog(rank) as watchdog:
    watchdog.report("phase", name="step", step=7, deadline_s=(0.3, 1.0)[rank])
    if rank == 1:
        threading.Event().wait(600)
    dist.barrier()
"""


def run(sleep_s: float) -> subprocess.CompletedProcess[str]:
    """A process that sleeps in a phase whose limit is 0.4 s."""
    command = [sys.executable, "-c", PROGRAM, str(sleep_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def two_ranks(program: str, folder: Path) -> list[subprocess.Popen[str]]:
    """Two processes that meet in a folder."""
    where = (folder / "meet").as_uri()
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]


def waited_s(said: str) -> float:
    """How long a rank says that it hung."""
    found = re.search(r" for ([0-9.]+) s", said)
    assert found is not None, said
    return float(found[1])


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
    assert ended.stderr.startswith("phalanx: hang of rank 3: in phase 'step' of step 7 for ")
    assert 0.4 <= waited_s(ended.stderr) < 5.0
    assert "in doze_off" in ended.stderr


def test_rank_that_leaves_in_time_is_let_go() -> None:
    ended = run(0.0)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.timeout(120)
def test_rank_that_waits_in_a_collective_lets_the_one_to_blame_speak_first(tmp_path: Path) -> None:
    """Rank 0's own limit is over first; a launcher would have ended rank 1 before it had told its stack."""
    ranks = two_ranks(COLLECTIVE, tmp_path)
    try:
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == 1 and "phalanx: hang of rank 1: in phase 'step' of step 7 for " in said[1]
    assert 1.0 <= waited_s(said[1]) < 5.3
    assert ranks[0].returncode != 0 and "hang of rank 0" not in said[0], said[0]


@pytest.mark.timeout(120)
def test_rank_whose_peers_stay_silent_in_a_collective_speaks_itself(tmp_path: Path) -> None:
    ranks = two_ranks(COLLECTIVE.replace("(0.3, 1.0)[rank]", "(0.3, 600.0)[rank]"), tmp_path)
    try:
        said = ranks[0].communicate(timeout=100)[1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 1 and "hang of rank 0: in phase 'step' of step 7 for " in said, said
    assert waited_s(said) >= 5.3
    assert "5 s for its peers" in said
