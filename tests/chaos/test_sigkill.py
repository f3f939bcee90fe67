"""SIGKILL at 30 random moments: of preparations, of ranks within steps and saves, of `phalanx run` itself.

After each one the newest live checkpoint loads; at the end of each run the proof holds. The seed is printed where a
test fails; PHALANX_CHAOS_SEED sets it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.jobs import (
    PHALANX,
    TIMEOUT_S,
    Command,
    Run,
    assert_proven,
    every_manifest_holds,
    job_folder,
    lineage_of,
    run_cli,
    run_here,
    wait_until,
    write_corpus,
    write_job,
)

from phalanx.gang import Event, ForkServer

SEED = int(os.environ.get("PHALANX_CHAOS_SEED", "20261128"))
NUM_PREPARE_KILLS, NUM_RANK_KILLS, NUM_RUN_KILLS = 8, 14, 8
PREPARE = ("--vocab-size", "600", "--held-out-fraction", "0.1", "--shard-tokens", "2000", "--json")


@pytest.fixture
def draw() -> random.Random:
    """Numbers from the printed seed."""
    print(f"PHALANX_CHAOS_SEED={SEED}")  # noqa: T201 (pytest shows it where a test fails)
    return random.Random(SEED)


def objects_below(folder: Path) -> int:
    """How many files there are, hidden ones (uploads in flight) included."""
    return sum(path.is_file() for path in folder.rglob("*"))


@pytest.mark.timeout(180)
def test_prepare_killed_at_random_moments_ends_as_if_never_killed(tmp_path: Path, draw: random.Random) -> None:
    text = write_corpus(tmp_path / "text", num_documents=800)
    reports = [json.loads(run_cli(["data", "prepare", text, "--out", (tmp_path / "whole").as_uri(), *PREPARE]).out)]
    killed = tmp_path / "killed"
    arguments = [PHALANX, "data", "prepare", text, "--out", killed.as_uri(), *PREPARE]
    for number in range(NUM_PREPARE_KILLS):
        with Command(arguments) as command:
            if (
                number > 1
            ):  # the first ones meet the start and the tokenizer's training, the others the writing of shards
                enough = objects_below(killed) + draw.randint(1, 20)
                wait_until(
                    lambda enough=enough, command=command: (
                        objects_below(killed) >= enough or command.process.poll() is not None
                    ),
                    TIMEOUT_S,
                    "no objects",
                )
            time.sleep(draw.uniform(0.0, 0.02) if number > 1 else draw.uniform(0.1, 0.5))
            command.signal(signal.SIGKILL)
            assert command.finish().code == -signal.SIGKILL, "the preparation was over before the kill"
    finished = run_cli([*arguments[1:]])
    assert finished.code == 0, finished.err
    reports.append(json.loads(finished.out))
    whole, resumed = ({name: report[name]["digest"] for name in ("train", "held_out")} for report in reports)
    assert whole == resumed
    assert run_cli(["data", "verify", killed.as_uri()]).code == 0


@dataclass(slots=True)
class Killer:
    """Kills a random rank a random moment after every few events, and looks at storage once the gang is over."""

    draw: random.Random
    path: Path
    kills_left: int
    struck: int = 0
    pending: bool = False
    seen: list[str] = field(default_factory=list)

    def observe(self, run: Run, event: Event) -> None:
        """Called with every event of the run."""
        if event.kind == "incident":
            self.pending = False
            every_manifest_holds(self.path)
        is_save = event.kind == "phase" and event.fields["name"] == "save" and event.rank == 0
        if self.pending or not self.kills_left or not (event.kind in ("committed", "progress") or is_save):
            return
        if self.draw.random() < 0.4:
            assert run.gang is not None
            time.sleep(self.draw.uniform(0.0, 0.15))
            os.kill(run.gang.pids[self.draw.randrange(len(run.gang.pids))], signal.SIGKILL)
            self.pending, self.kills_left, self.struck = True, self.kills_left - 1, self.struck + 1
            self.seen.append(event.kind)


@pytest.mark.timeout(180)
def test_ranks_killed_at_random_moments_lose_nothing(
    corpus: str, server: ForkServer, tmp_path: Path, draw: random.Random
) -> None:
    path = write_job(tmp_path, corpus, steps=400)
    killer = Killer(draw, path, NUM_RANK_KILLS)
    budget = f"recovery.max_attempts_without_progress={NUM_RANK_KILLS + 1}"

    def observe(run: Run, event: Event) -> None:
        killer.observe(run, event)
        if not killer.kills_left and not killer.pending and event.kind == "committed" and run.gang is not None:
            run.gang.signal(signal.SIGTERM)

    run = run_here(path, server, budget, on_event=observe)
    assert run.outcome is not None and run.outcome.state in ("stopped", "ok"), run.outcome
    assert killer.struck == NUM_RANK_KILLS and len(set(killer.seen)) > 1
    assert len(run.tally.incidents) == NUM_RANK_KILLS, run.tally.incidents
    assert all("killed by SIGKILL" in incident for incident in run.tally.incidents), run.tally.incidents
    steps = every_manifest_holds(path)[-1].step
    assert run.tally.step == steps == lineage_of(path).checkpoints()[-1].step
    assert_proven(path, steps)


RUN_EVENTS = ("opens after step", "step ", "committed", "committed")


@pytest.mark.timeout(240)
def test_phalanx_run_killed_at_random_moments_leaves_nothing_running_and_loses_nothing(
    corpus: str, server: ForkServer, tmp_path: Path, draw: random.Random
) -> None:
    path = write_job(tmp_path, corpus, steps=5000)
    for number in range(NUM_RUN_KILLS):
        with Command([PHALANX, "run", path]) as command:
            if number == 0:
                wait_until(lambda: (job_folder(path) / "job.json").exists(), TIMEOUT_S, "no job")
            else:
                command.wait_for(draw.choice(RUN_EVENTS))
            time.sleep(draw.uniform(0.0, 0.3))
            command.signal(signal.SIGKILL)
            assert command.finish().code == -signal.SIGKILL
            command.wait_until_nothing_lives()
        every_manifest_holds(path)
    live = lineage_of(path).checkpoints()
    assert live, "no kill was late enough for a checkpoint"
    steps = live[-1].step + 4
    run = run_here(path, server, f"training.steps={steps}")
    assert run.outcome is not None and run.outcome.ok
    assert_proven(path, steps)
