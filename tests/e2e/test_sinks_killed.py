"""What the sinks hold after a run that lost a rank: each step once, though some were done twice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support.jobs import PHALANX, Command, write_job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEPS = 8


@pytest.mark.timeout(180)
def test_sinks_after_a_killed_rank_hold_each_step_once(corpus: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus, steps=STEPS, more="\n[validation]\nfreq = 8\nwindows = 8\n")
    sinks = ["--set", "metrics.enable_tensorboard=true", "--set", "metrics.enable_wandb=true"]
    with Command([PHALANX, "run", path, *sinks, "--json"], {"WANDB_MODE": "offline"}) as run:
        run.wait_for("step 3/8")
        os.kill(run.ranks()[1], signal.SIGKILL)
        finished = run.finish()
        run.wait_until_nothing_lives()
    assert finished.code == 0, finished.err
    assert json.loads(finished.out)["steps_redone"] > 0, "no step was done twice, so nothing is shown"

    folder = tmp_path / "metrics" / "tiny"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["evaluation/loss"] > 0
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    assert list(folder.glob("**/offline-run-*/*.wandb")), "W&B wrote no offline run"
