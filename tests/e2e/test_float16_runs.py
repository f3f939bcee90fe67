"""Whole runs with weights of float16: overflows, a scale that falls and grows, and a killed rank, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
from support.jobs import Run, lineage_of, losses_of, newest_tensors, run_here, write_job

from phalanx.gang import Event, ForkServer
from phalanx.lineage import StepRows

# From far too large a scale down to one that fits, within a few steps; it grows after three that are finite.
KEYS = (
    "training.steps=10",
    "checkpoint.interval=2",
    "training.mixed_precision_param=float16",
    "training.non_finite=stop",
    "training.loss_scale_init=1e12",
    "training.loss_scale_backoff=0.001",
    "training.loss_scale_interval=3",
)


def job_in(folder: Path, name: str, corpus: str) -> Path:
    (folder / name).mkdir()
    return write_job(folder / name, corpus, steps=10)


def scale_of(path: Path) -> tuple[float, float]:
    lineage = lineage_of(path)
    schedule = lineage.manifest(lineage.checkpoints()[-1]).schedule
    return schedule["loss_scale"], schedule["loss_scale_steps"]


def test_run_whose_rank_is_killed_goes_on_with_its_scale_bit_for_bit(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    ours, theirs = (job_in(tmp_path, name, corpus) for name in ("ours", "theirs"))
    killed: list[int] = []
    scales: dict[str, dict[int, float]] = {"ours": {}, "theirs": {}}

    def watch(name: str, event: Event) -> None:
        if event.kind == "overflow" and event.rank == 0:
            scales[name][event.fields["step"]] = event.fields["loss_scale"]

    def kill(run: Run, event: Event) -> None:
        watch("ours", event)
        if event.kind == "committed" and not killed:
            assert run.gang is not None
            killed.append(run.gang.pids[1])
            os.kill(run.gang.pids[1], signal.SIGKILL)

    run = run_here(ours, server, *KEYS, on_event=kill)
    assert killed and run.outcome is not None and run.outcome.ok, run.outcome
    straight = run_here(theirs, server, *KEYS, on_event=lambda _, event: watch("theirs", event))
    assert straight.outcome is not None and straight.outcome.ok, straight.outcome
    assert len(lineage_of(ours).attempts()) == 2
    assert straight.tally.skipped_updates == len(scales["theirs"]) > 1
    assert scales["ours"] == scales["theirs"] and scales["theirs"][1] == 1e12
    scale, _ = scale_of(theirs)
    assert scale_of(ours) == scale_of(theirs)
    assert scale > 1e12 * 0.001 ** len(scales["theirs"]), "it grew after steps that were finite"
    assert losses_of(ours) == losses_of(theirs)
    for path in (ours, theirs):
        rows = StepRows.concatenate([steps for _, steps in lineage_of(path).records.live()])
        told = dict(zip(rows.step.tolist(), rows.loss_scale.tolist(), strict=True))
        assert set(rows.step[rows.overflowed].tolist()) == scales["theirs"].keys(), "records tell them apart"
        assert {step: told[step] for step in scales["theirs"]} == scales["theirs"]
    found, expected = newest_tensors(ours), newest_tensors(theirs)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_state_on_a_disk_gives_the_same_bits(corpus: str, server: ForkServer, tmp_path: Path) -> None:
    ours, theirs = (job_in(tmp_path, name, corpus) for name in ("ours", "theirs"))
    disk = ("optimizer.offload=nvme", f"optimizer.offload_folder={tmp_path / 'disk'}", "optimizer.offload_gib=0.001")
    for path, more in ((ours, disk), (theirs, ())):
        run = run_here(path, server, *KEYS, *more)
        assert run.outcome is not None and run.outcome.ok and run.tally.skipped_updates > 1, run.outcome
    assert scale_of(ours) == scale_of(theirs) and losses_of(ours) == losses_of(theirs)
    found = newest_tensors(ours)
    for name, values in newest_tensors(theirs).items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_losses_stay_near_those_of_float32(corpus: str, server: ForkServer, tmp_path: Path) -> None:
    narrow, wide = (job_in(tmp_path, name, corpus) for name in ("narrow", "wide"))
    for path, param in ((narrow, "float16"), (wide, "float32")):
        run = run_here(path, server, "training.steps=6", f"training.mixed_precision_param={param}")
        assert run.outcome is not None and run.outcome.ok, run.outcome
    found, expected = losses_of(narrow), losses_of(wide)
    assert len(found) == 6
    for step, loss in expected.items():
        assert 0 < abs(found[step] - loss) < 1e-3 * loss, (step, found[step], loss)
