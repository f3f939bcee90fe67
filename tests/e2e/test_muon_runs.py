"""Whole runs with Muon: through a killed rank bit for bit, and from one layout into another."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
from support.jobs import Run, lineage_of, losses_of, newest_tensors, run_here, write_job

from phalanx.gang import Event, ForkServer

MUON = ("optimizer.name=muon",)
LAYOUTS = (
    ("cluster.nproc=2",),
    ("cluster.nproc=2", "parallel.tp=2"),
    ("cluster.nproc=2", "parallel.pp=2", "parallel.local_batch_size=2"),
    ("cluster.nproc=2", "parallel.dp_replicate=2", "parallel.zero=1"),
)
BOUND = 1e-5  # of losses in float32


def job_in(folder: Path, name: str, corpus: str) -> Path:
    (folder / name).mkdir()
    return write_job(folder / name, corpus, steps=4)


def test_run_whose_rank_is_killed_goes_on_bit_for_bit(corpus: str, server: ForkServer, tmp_path: Path) -> None:
    ours, theirs = (job_in(tmp_path, name, corpus) for name in ("ours", "theirs"))
    killed: list[int] = []

    def kill(run: Run, event: Event) -> None:
        if event.kind == "committed" and not killed:
            assert run.gang is not None
            killed.append(run.gang.pids[1])
            os.kill(run.gang.pids[1], signal.SIGKILL)

    keys = ("training.steps=8", "checkpoint.interval=2", *MUON)
    run = run_here(ours, server, *keys, on_event=kill)
    assert killed and run.outcome is not None and run.outcome.ok, run.outcome
    assert run_here(theirs, server, *keys).outcome is not None
    assert len(lineage_of(ours).attempts()) == 2
    assert losses_of(ours) == losses_of(theirs)
    found, expected = newest_tensors(ours), newest_tensors(theirs)
    assert found.keys() == expected.keys() and any(name.endswith(".momentum") for name in found)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_run_that_goes_on_in_other_layouts_learns_what_one_process_does(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    ours, theirs = (job_in(tmp_path, name, corpus) for name in ("ours", "theirs"))
    more = ("lr_scheduler.total_steps=8", *MUON)
    for number, layout in enumerate(LAYOUTS, 1):
        run = run_here(ours, server, f"training.steps={2 * number}", *layout, *more)
        assert run.outcome is not None and run.outcome.ok, run.outcome
    one = ("cluster.nproc=1", "parallel.local_batch_size=8", "training.steps=8")
    run = run_here(theirs, server, *one, *more)
    assert run.outcome is not None and run.outcome.ok, run.outcome
    found, expected = losses_of(ours), losses_of(theirs)
    assert found.keys() == expected.keys() and len(found) == 8
    for step, loss in expected.items():
        assert abs(found[step] - loss) < BOUND, (step, found[step], loss)
