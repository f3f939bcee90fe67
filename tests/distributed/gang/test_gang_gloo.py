"""Gangs of real gloo ranks: start-up, first causes among connection errors, hangs."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gang_waiting import is_alive

from phalanx.gang import Budget, Event, GangOrder, supervise
from phalanx.gang.testing import run_gang

pytestmark = pytest.mark.distributed


def test_gang_of_eight_reaches_its_first_all_reduce_well_below_1_5_s(fork_server, tmp_path, record_property):
    run_gang(fork_server, 8, "gang_entries:all_reduce_once")  # the server's imports are over after this
    took_s = []
    for number in range(5):
        start_s = time.monotonic()
        gang = fork_server.start(GangOrder(8, "gang_entries:all_reduce_once", tmp_path / str(number)))
        results = [event for event in gang.events(60.0) if event.kind == "result"]
        took_s.append(max(event.time_monotonic_s for event in results) - start_s)
        assert gang.end(0.0).ok
        assert [event.fields["total"] for event in results] == [28.0] * 8
        assert {event.fields["threads"] for event in results} == {1}
    record_property("first_all_reduce_s", took_s)
    print("seconds from order to the last rank's first all_reduce:", [round(value, 3) for value in took_s])  # noqa: T201
    assert statistics.median(took_s) < 1.5


def test_gang_rank_that_raises_is_the_cause_though_its_peers_fail_first(fork_server, tmp_path):
    gang = fork_server.start(GangOrder(4, "gang_entries:raise_late", tmp_path))
    errors = [event for event in gang.events(60.0) if event.kind == "error"]
    outcome = gang.end(0.0)
    assert min(errors, key=lambda event: event.time_monotonic_s).rank != 2
    cause = outcome.first_cause
    assert (cause.kind, cause.rank, cause.message) == ("error", 2, "ValueError: the loss went to the moon")
    assert "raise_late" in cause.where


def test_gang_sigkill_among_collectives_names_the_dead_rank(fork_server, tmp_path):
    gang = fork_server.start(GangOrder(8, "gang_entries:all_reduce_until_dead", tmp_path))
    ready = 0
    for event in gang.events(60.0):
        ready += event.kind == "phase"
        if ready == 8:
            break
    os.kill(gang.pids[5], signal.SIGKILL)
    killed_s = time.monotonic()
    assert list(gang.events(30.0)) and gang.over
    assert time.monotonic() - killed_s < 5.0
    cause = gang.outcome().first_cause
    assert (cause.kind, cause.rank, cause.signal) == ("process_death", 5, signal.SIGKILL)


def test_gang_collective_of_unequal_sizes_names_an_abort(fork_server, tmp_path):
    gang = fork_server.start(GangOrder(2, "gang_entries:mismatch", tmp_path))
    assert list(gang.events(60.0)) and gang.over
    cause = gang.outcome().first_cause
    assert (cause.kind, cause.signal) == ("process_death", signal.SIGABRT)


def test_supervise_rank_asleep_in_a_collectives_place_is_a_hang_with_its_stack(fork_server, tmp_path):
    seen: list[Event] = []
    arguments = {"sleeper": 3, "deadline_s": 2.0}

    def start(number):
        return fork_server.start(
            GangOrder(8, "gang_entries:nap_in_collectives_place", tmp_path, arguments, attempt=number)
        )

    outcome = supervise(start, Budget(1), seen.append)
    entered_s = max(event.time_monotonic_s for event in seen if event.fields.get("name") == "step")
    (incident,) = [event for event in seen if event.kind == "incident"]
    assert incident.time_monotonic_s - entered_s < 2.0 + 5.0
    cause = outcome.first_cause
    assert (outcome.state, cause.kind, cause.rank) == ("failed", "hang", 3)
    assert "a_long_nap" in cause.where and "nap_in_collectives_place" in cause.detail
    assert {death.signal for death in outcome.exits} == {signal.SIGKILL}


def test_supervise_save_longer_than_a_step_is_no_hang_of_the_ranks_that_wait_for_it(fork_server, tmp_path):
    arguments = {"save_s": 4.0, "step_s": 2.0}

    def start(number):
        return fork_server.start(GangOrder(2, "gang_entries:save_slowly", tmp_path, arguments))

    outcome = supervise(start, Budget(1), lambda event: None)
    assert outcome.ok, outcome.first_cause


def test_ranks_that_hold_different_attempts_end(fork_server, tmp_path):
    gang = fork_server.start(GangOrder(2, "gang_entries:differing_attempts", tmp_path))
    assert list(gang.events(60.0)) and gang.over
    cause = gang.outcome().first_cause
    assert cause.kind == "storage" and "attempts 3 to 4" in cause.message


def test_supervise_deadlines_off_lets_a_slow_phase_be(fork_server, tmp_path):
    arguments = {"sleeper": -1, "deadline_s": 0.0}

    def start(number):
        return fork_server.start(GangOrder(2, "gang_entries:nap_in_collectives_place", tmp_path, arguments))

    assert supervise(start, Budget(1), lambda event: None, deadlines_off=True).ok


def test_init_process_group_under_torchrun_restarts_cleanly(tmp_path):
    """Two ranks under torchrun; the first attempt ends by SIGKILL, the second finds no trace of it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    script = Path(__file__).parent / "torchrun_entry.py"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], capture_output=True, text=True, timeout=110, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["restart0-rank0", "restart1-rank0", "restart1-rank1"]
    assert not any(is_alive(int(path.read_text())) for path in tmp_path.iterdir())
