"""Supervised runs: retries, budgets, stops, and parents that are killed; nothing is left running."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from gang_waiting import wait_until

from phalanx.gang import Budget, Gang, GangOrder, StopSignals, supervise

pytestmark = pytest.mark.distributed


def starter(server, tmp_path, entry, world_size=2, **arguments):
    def start(number: int) -> Gang:
        return server.start(
            GangOrder(world_size, f"gang_entries:{entry}", tmp_path / str(number), arguments, attempt=number)
        )

    return start


def ignore(event) -> None:
    """What a run without a screen does with events."""


def test_supervise_failure_is_retried_until_it_goes_well(plain_server, tmp_path):
    seen = []
    outcome = supervise(
        starter(plain_server, tmp_path, "fail_until", commits=[], good_attempt=2), Budget(3), seen.append
    )
    assert (outcome.state, outcome.attempts) == ("ok", 3)
    assert [event.fields["number"] for event in seen if event.kind == "attempt"] == [0, 1, 2]
    incidents = [event.fields for event in seen if event.kind == "incident"]
    assert [incident["retry"] for incident in incidents] == [True, True]
    assert incidents[1]["message"] == "RuntimeError: attempt 1 fails"


def test_supervise_attempts_without_progress_end_the_run(plain_server, tmp_path):
    outcome = supervise(starter(plain_server, tmp_path, "fail_until", commits=[], good_attempt=99), Budget(3), ignore)
    assert (outcome.state, outcome.attempts, outcome.first_cause.kind) == ("failed", 3, "error")


def test_supervise_attempts_with_a_commit_do_not_count(plain_server, tmp_path):
    outcome = supervise(
        starter(plain_server, tmp_path, "fail_until", commits=[0, 1, 3], good_attempt=99), Budget(2), ignore
    )
    assert outcome.attempts == 6  # 0, 1 commit; 2 counts; 3 commits; 4, 5 count


def test_supervise_user_error_is_never_retried(plain_server, tmp_path):
    outcome = supervise(starter(plain_server, tmp_path, "raise_user_error"), Budget(3), ignore)
    assert (outcome.attempts, outcome.first_cause.kind) == (1, "user_error")


def test_supervise_error_of_the_caller_leaves_no_rank(plain_server, tmp_path):
    gangs = []

    def start(number):
        gangs.append(starter(plain_server, tmp_path, "wait_deaf", 4)(number))
        return gangs[-1]

    def explode(event):
        if event.kind == "phase":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        supervise(start, Budget(3), explode)
    assert gangs[0].over


def test_supervise_puts_the_signal_handlers_back(plain_server, tmp_path):
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    supervise(starter(plain_server, tmp_path, "echo"), Budget(1), ignore)
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


def test_supervise_in_a_thread_stops_by_request(plain_server, tmp_path):
    stop, outcomes = StopSignals(), []

    def on_event(event):
        if event.kind == "phase":
            stop.request()

    def run():
        with stop:
            outcomes.append(
                supervise(starter(plain_server, tmp_path, "commit_on_sigterm", 4), Budget(1), on_event, stop=stop)
            )

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30.0)
    assert outcomes[0].state == "stopped"


def test_supervise_stop_before_the_first_attempt_starts_nothing(tmp_path):
    stop = StopSignals()
    stop.request()
    outcome = supervise(lambda number: pytest.fail("started"), Budget(1), ignore, stop=stop)
    assert (outcome.state, outcome.first_cause.kind) == ("stopped", "interrupted")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_parent_one_signal_lets_the_ranks_commit(start_parent, signum):
    parent = start_parent(8, "commit_on_sigterm")
    parent.read_until("event", "phase", times=8)
    parent.process.send_signal(signum)
    outcome = parent.read_until("outcome")
    assert (outcome["state"], outcome["cause"]) == ("stopped", None)
    assert parent.process.wait(10) == 0
    parent.wait_all_gone(5.0)


def test_parent_second_signal_kills_at_once(start_parent):
    parent = start_parent(8, "wait_deaf", grace_s=600.0)
    parent.read_until("event", "phase", times=8)
    parent.process.send_signal(signal.SIGINT)
    parent.read_until("event", "stopping")
    signalled_s = time.monotonic()
    parent.process.send_signal(signal.SIGINT)
    outcome = parent.read_until("outcome")
    assert time.monotonic() - signalled_s < 5.0
    assert (outcome["state"], outcome["cause"]) == ("stopped", "interrupted")
    parent.wait_all_gone(5.0)


def test_parent_grace_that_runs_out_kills(start_parent):
    parent = start_parent(4, "wait_deaf", grace_s=0.3)
    parent.read_until("event", "phase", times=4)
    parent.process.send_signal(signal.SIGTERM)
    outcome = parent.read_until("outcome")
    assert (outcome["state"], outcome["cause"]) == ("stopped", "interrupted")
    parent.wait_all_gone(5.0)


@pytest.mark.parametrize("phase", ["handlers", "server", "gang", "event"])
def test_parent_sigint_in_each_phase_leaves_nothing(start_parent, phase):
    parent = start_parent(8, "import_slowly")
    parent.read_until(phase)
    parent.process.send_signal(signal.SIGINT)
    outcome = parent.read_until("outcome")
    assert outcome["state"] == "stopped"
    assert parent.process.wait(10) == 0
    parent.wait_all_gone(5.0)


@pytest.mark.parametrize("entry", ["wait_forever", "wait_deaf"])
def test_parent_sigkill_takes_server_and_ranks_with_it(start_parent, entry):
    parent = start_parent(8, entry)
    parent.read_until("event", "phase", times=8)
    assert len(parent.pids) == 9
    os.kill(parent.process.pid, signal.SIGKILL)
    parent.wait_all_gone(5.0)


@pytest.mark.parametrize("entry", ["wait_forever", "wait_deaf"])
def test_parent_with_threads_sigkill_takes_all_servers_and_ranks_with_it(start_parent, entry):
    parent = start_parent(4, entry, program="threaded_parent.py")
    parent.read_until("event", "phase", times=8)
    assert len(parent.pids) == 10
    os.kill(parent.process.pid, signal.SIGKILL)
    parent.wait_all_gone(5.0)


def test_parent_sigkill_while_the_server_imports_takes_it_along(start_parent):
    parent = start_parent(2, "echo", "slow_module")
    parent.read_until("server")
    wait_until(lambda: b"phalanx.gang.server" in command_line(parent.pids[0]), 10.0, "the server runs")
    os.kill(parent.process.pid, signal.SIGKILL)
    parent.wait_all_gone(5.0)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
