"""A run that was cut off and comes back: what it still commits is never on the live chain."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.jobs import (
    PHALANX,
    Command,
    assert_proven,
    every_manifest_holds,
    lineage_of,
    newest_tensors,
    run_here,
    write_job,
)

from phalanx.gang import ForkServer
from phalanx.lineage import CheckpointRef

STEPS = 24


def test_zombie_that_commits_after_the_next_attempt_opened_is_never_live(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    """Checkpoint case 14."""
    path = write_job(tmp_path, corpus, steps=STEPS)
    with Command([PHALANX, "run", path]) as zombie:
        zombie.wait_for("checkpoint of step 4 committed")
        ranks = zombie.ranks()
        assert len(ranks) == 2
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        before = set(every_manifest_holds(path))
        assert max(before).step < STEPS, "the first run was not stopped in time"

        second = run_here(path, server)
        assert second.outcome is not None and second.outcome.ok and second.tally.attempts == [2]
        live, tensors = lineage_of(path).checkpoints(), newest_tensors(path)
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        finished = zombie.finish()
        assert finished.code == 2, zombie.err
        assert "attempt 2 has been opened since" in finished.err
        zombie.wait_until_nothing_lives()

    late = set(every_manifest_holds(path)) - before - set(live)
    assert {ref.attempt for ref in late} == {1}, "the zombie committed nothing, so nothing is shown"
    lineage = lineage_of(path)
    assert lineage.checkpoints() == live and live[-1] == CheckpointRef(2, STEPS)
    parent = lineage.attempts()[1].parent
    assert parent is not None and {ref for ref in live if ref.attempt == 1} == {r for r in before if r <= parent}
    assert all((newest_tensors(path)[name] == values).all() for name, values in tensors.items())
    assert_proven(path, STEPS)

    further = run_here(path, server, f"training.steps={STEPS + 2}")
    assert further.outcome is not None and further.outcome.ok
    assert lineage_of(path).attempts()[2].parent == CheckpointRef(2, STEPS)
    assert_proven(path, STEPS + 2)
