"""Whole runs with optimizer state in files: the bits of the same runs in memory, in any layout, through kills."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from support.jobs import Run, assert_proven, lineage_of, losses_of, newest_tensors, run_cli, run_here, write_job

from phalanx.gang import Event, ForkServer

LEAST = "optimizer.offload_gib=0.001"
LAYOUTS = {
    "one": ("cluster.nproc=1", "parallel.local_batch_size=8"),
    "fully_sharded": ("cluster.nproc=2",),
    "replicas": ("cluster.nproc=2", "parallel.dp_replicate=2", "parallel.zero=1"),
    "tensors": ("cluster.nproc=2", "parallel.tp=2"),
    "pipeline": ("cluster.nproc=2", "parallel.pp=2", "parallel.local_batch_size=2"),
}


def on_disk(folder: Path) -> tuple[str, ...]:
    return ("optimizer.offload=nvme", f"optimizer.offload_folder={folder / 'disk'}", LEAST)


def job_in(folder: Path, name: str, corpus: str) -> Path:
    (folder / name).mkdir()
    return write_job(folder / name, corpus, steps=4)


def require_same(ours: Path, theirs: Path) -> None:
    assert losses_of(ours) == losses_of(theirs)
    found, expected = newest_tensors(ours), newest_tensors(theirs)
    assert found.keys() == expected.keys() and any(name.startswith("optim.") for name in found)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_with_its_state_on_disk_is_bit_equal_to_one_in_memory(
    corpus: str, server: ForkServer, tmp_path: Path, layout: str
) -> None:
    ours, theirs = (job_in(tmp_path, name, corpus) for name in ("ours", "theirs"))
    run = run_here(ours, server, *LAYOUTS[layout], *on_disk(tmp_path))
    assert run.outcome is not None and run.outcome.ok, run.outcome
    run_here(theirs, server, *LAYOUTS[layout])
    require_same(ours, theirs)
    assert list((tmp_path / "disk").iterdir()) == []
    assert_proven(ours, 4, *on_disk(tmp_path))


def test_runs_that_go_on_in_other_layouts_and_places_are_bit_equal_to_those_in_memory(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    """From memory to disk and back, from each layout to another; both runs change layouts alike."""
    ours, theirs = (job_in(tmp_path, name, corpus) for name in ("ours", "theirs"))
    places = ((), on_disk(tmp_path), on_disk(tmp_path), (), on_disk(tmp_path))
    for number, (layout, place) in enumerate(zip(LAYOUTS.values(), places, strict=True), 1):
        for path, keys in ((ours, place), (theirs, ())):
            run = run_here(path, server, f"training.steps={2 * number}", "lr_scheduler.total_steps=10", *layout, *keys)
            assert run.outcome is not None and run.outcome.ok, run.outcome
    require_same(ours, theirs)
    assert len(losses_of(ours)) == 2 * len(LAYOUTS)


def test_killed_rank_leaves_no_file_and_the_run_goes_on_bit_for_bit(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    ours, theirs = (job_in(tmp_path, name, corpus) for name in ("ours", "theirs"))
    killed: list[int] = []

    def kill(run: Run, event: Event) -> None:
        if event.kind == "committed" and not killed:
            assert run.gang is not None
            killed.append(run.gang.pids[1])
            assert list((tmp_path / "disk").iterdir()) == [], "files have no names"
            os.kill(run.gang.pids[1], signal.SIGKILL)

    keys = ("training.steps=8", "checkpoint.interval=2")
    run = run_here(ours, server, *keys, *on_disk(tmp_path), on_event=kill)
    assert killed and run.outcome is not None and run.outcome.ok, run.outcome
    run_here(theirs, server, *keys)
    require_same(ours, theirs)
    assert list((tmp_path / "disk").iterdir()) == [] and len(lineage_of(ours).attempts()) == 2


def test_sizes_are_told_before_the_run_and_by_config_check(corpus: str, tmp_path: Path) -> None:
    path = job_in(tmp_path, "told", corpus)
    overrides = [word for each in on_disk(tmp_path) for word in ("--set", each)]
    checked = run_cli(["config", "check", path, *overrides])
    assert checked.code == 0, checked.err
    (line,) = (line for line in checked.out.splitlines() if line.startswith("optimizer state on disk: "))
    assert str(tmp_path / "disk") in line and "1.0 MiB of memory a rank" in line
    found = json.loads(run_cli(["config", "check", path, "--json", *overrides]).out)["optimizer_on_disk"]
    assert found["memory_bytes"] == int(0.001 * 2**30) and found["node_bytes"] == 2 * found["rank_bytes"] > 0
    run = run_cli(["run", path, *overrides])
    assert run.code == 0 and line in run.err.splitlines(), run.err
