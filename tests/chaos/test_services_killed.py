"""SIGKILL to the four services and the agent at 30 random moments of one run: it goes on or waits, ends right, and the
proof holds.

The seed is printed where the test fails; PHALANX_CHAOS_SEED sets it.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from support.jobs import assert_proven, every_manifest_holds, lineage_of, wait_until, write_job
from support.services import Services, resized, services, wait_for_step

from phalanx import Client
from phalanx.lineage.events import EventLog, EventType, JobState
from phalanx.rpc import Unavailable
from phalanx.spec import load_job
from phalanx.trainer.places import job_store

SEED = int(os.environ.get("PHALANX_CHAOS_SEED", "20261128"))
VICTIMS = ("data", "train", "checkpoint", "monitor") * 6 + ("agent",) * 6
TOGETHER, LONGEST_PAUSE_S = 0.25, 1.5
FAR = 1_000_000


def strike(running: Services, victim: str, dead: set[int]) -> None:
    """SIGKILL as soon as the process lives, which may be before it is ready. dead: pids that were struck before."""

    def kill() -> bool:
        pid = running.state.process(victim).pid
        if not pid or pid in dead:
            return False
        running.kill(victim)
        dead.add(pid)
        return True

    wait_until(kill, 30, f"{victim} does not come back")


def is_running(client: Client, name: str) -> bool:
    """Whether the job runs, as far as train can be asked."""
    try:
        return client.job(name).state is JobState.RUNNING
    except Unavailable:
        return False


@pytest.mark.timeout(420)
def test_run_survives_thirty_kills_of_services_and_agent(corpus: str, tmp_path: Path) -> None:
    print(f"PHALANX_CHAOS_SEED={SEED}")  # noqa: T201 (pytest shows it where a test fails)
    draw = random.Random(SEED)
    victims = list(VICTIMS)
    draw.shuffle(victims)
    # More than there are kills: an attempt that the next kill meets before its first checkpoint has no progress.
    budget = f"\n[recovery]\nmax_attempts_without_progress = {len(victims) + 1}\n"
    path = write_job(tmp_path, corpus, steps=FAR, more=budget)
    path = resized(path, ("interval = 2", "interval = 5"))
    began_s = time.monotonic()
    with services(tmp_path / "home", slots=2) as running, running.client() as client:
        client.submit(path)
        wait_for_step(client, "tiny", 5)
        dead: set[int] = set()
        for victim in victims:
            strike(running, victim, dead)
            if draw.random() < TOGETHER:
                continue  # the next one falls at once
            if draw.random() < 0.5:
                wait_until(lambda: is_running(client, "tiny"), 60, "the job does not run again")
            time.sleep(draw.uniform(0.0, LONGEST_PAUSE_S))
        killed_s = time.monotonic() - began_s
        running.wait_ready()
        wait_until(lambda: is_running(client, "tiny"), 60, "the job does not run again")
        restarts = {each.name: each.restarts for each in running.state.processes}
        assert restarts == dict.fromkeys(restarts, 6), restarts
        best = lineage_of(path).checkpoints()[-1].step
        wait_for_step(client, "tiny", best + 5)
        client.stop("tiny")
        stopped = client.wait("tiny", 60)
        assert stopped.state is JobState.STOPPED, stopped
        steps = stopped.step + 10
        client.resume("tiny", [f"training.steps={steps}"])
        done = client.wait("tiny", 60)
        assert done.state is JobState.SUCCEEDED and done.step == steps, done
        log = list(EventLog(job_store(load_job(path))).after(0))
        assert [event.number for event in log] == list(range(1, done.revision + 1))
        watched = [event for _, event in zip(log, client.watch("tiny"), strict=False)]
        assert [(event.revision, event.type) for event in watched] == [(event.number, event.type) for event in log]
    causes = {event.cause.kind for event in log if event.type is EventType.RECOVERING and event.cause}
    print(f"30 kills in {killed_s:.0f} s, {done.attempt} attempts, {steps} steps, {len(log)} events, {causes}")  # noqa: T201
    assert causes <= {"node_loss", "process_death", "interrupted", "lost_peer", "storage"}, causes
    every_manifest_holds(path)
    assert_proven(path, steps)
