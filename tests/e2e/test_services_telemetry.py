"""A monitor that hangs through most of a run: the run does not notice, and what was lost is counted to the row."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from support.jobs import assert_proven, user_job, wait_until
from support.services import Services, resized, services, wait_for_step

from phalanx.lineage.events import JobState
from phalanx.rpc import read_service

STEPS, STOP_AT = 300, 60
VALUES_A_ROW = 7
LONGEST_S = 1.0
LOST = re.compile(r"otlp lost (\d+) of (\d+) rows")


def rows_received(running: Services) -> float:
    """How many rows the monitor took, by its own figures."""
    address = read_service(running.home.config("monitor")).metrics
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return (
        next(float(line.split()[-1]) for line in lines if line.startswith("phalanx_monitor_otlp_points")) / VALUES_A_ROW
    )


@pytest.mark.timeout(300)
def test_monitor_that_hangs_costs_a_run_nothing_and_every_lost_row_is_counted(corpus: str, tmp_path: Path) -> None:
    times = tmp_path / "times"
    path = resized(user_job(tmp_path, corpus, "TimesReports", times=str(times)), ("steps = 6", f"steps = {STEPS}"))
    with services(tmp_path / "home", slots=2) as running, running.client() as client:
        client.submit(path)
        wait_for_step(client, "tiny", STOP_AT)
        before = rows_received(running)
        running.kill("monitor", signal.SIGSTOP)
        done = client.wait("tiny", 120)
        assert (done.state, done.attempt, done.step) == (JobState.SUCCEEDED, 1, STEPS), done
        log = running.home.log("agent")
        wait_until(lambda: LOST.search(log.read_text()), 60, "no word of lost rows")
        running.kill("monitor", signal.SIGCONT)
        running.wait_ready()
        wait_until(lambda: rows_received(running) >= before, 20, "no figures")
        after = rows_received(running)
    lost, put = (int(found) for found in LOST.search(log.read_text()).groups())
    assert put == STEPS
    assert before <= put - lost <= after + 1 and lost > STEPS // 2, (before, after, put, lost)
    for rank in range(2):
        told = json.loads(Path(f"{times}-{rank}").read_text())
        took_s, wall_s = told["took_s"], told["wall_s"]
        usual = float(np.median(took_s)) * len(took_s) / wall_s  # others of this machine may hold single ones up
        cpu = told["cpu_s"] / wall_s
        said = f"rank {rank}: {len(took_s)} reports in {wall_s:.1f} s: {usual:.3%} of it, CPU {cpu:.3%}, longest "
        print(f"{said}{max(took_s):.4f} s")  # noqa: T201
        assert len(took_s) > STEPS and usual < 0.01 and cpu < 0.01 and max(took_s) < LONGEST_S, (said, max(took_s))
    print(f"lost {lost} of {put}; received {before:g} before, {after:g} after")  # noqa: T201
    assert_proven(path, STEPS)
