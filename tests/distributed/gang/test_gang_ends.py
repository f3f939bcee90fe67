"""How gangs end: deaths, errors, silence, leftovers; eight real processes, no torch."""

from __future__ import annotations

import os
import pty
import resource
import signal
import time
from pathlib import Path

import pytest
from gang_waiting import is_alive, wait_until

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.gang import ForkServer, Gang, GangBusyError, GangOrder
from phalanx.gang.testing import run_gang

pytestmark = pytest.mark.distributed


def start(server: ForkServer, tmp_path: Path, entry: str, world_size: int = 8, **fields) -> Gang:
    return server.start(GangOrder(world_size, f"gang_entries:{entry}", tmp_path, **fields))


def wait_for_phases(gang: Gang) -> None:
    """Until every rank has said that it waits."""
    waiting = set(gang.pids)
    for event in gang.events(30.0):
        if event.kind == "phase":
            waiting.discard(event.rank)
        if not waiting:
            return
    raise AssertionError(f"ranks {waiting} never waited")


def drain(gang: Gang, timeout_s: float = 30.0) -> list:
    events = list(gang.events(timeout_s))
    assert gang.over, f"ranks {gang.alive} still alive"
    return events


def test_gang_threads_are_the_users_choice_and_its_network_is_this_host(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    with ForkServer((), {"PYTHONPATH": str(Path(__file__).parent)}) as server:
        (result,) = run_gang(server, 1, "gang_entries:tell_environ")
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    assert [result["environ"][name] for name in names] == ["3", "1", "lo"]


def test_gang_entry_gets_arguments_and_environment(plain_server):
    results = run_gang(plain_server, 8, "gang_entries:echo", {"a": [1, None]}, environ={"GREETING": "hello"})
    assert [result["rank"] for result in results] == list(range(8))
    assert all(result["arguments"] == {"a": [1, None]} and result["environ"] == "hello" for result in results)


def test_gang_reports_longer_than_a_pipe_arrive_whole(plain_server):
    results = run_gang(plain_server, 4, "gang_entries:long_report", {"num_bytes": 300_000})
    assert [(len(result["text"]), result["rank"]) for result in results] == [(300_000, rank) for rank in range(4)]


@pytest.mark.parametrize("entry", ["wait_forever", "wait_deaf"])
def test_gang_sigkill_of_one_rank_names_it_and_ends_the_peers_within_5_s(plain_server, tmp_path, entry):
    gang = start(plain_server, tmp_path, entry)
    wait_for_phases(gang)
    os.kill(gang.pids[3], signal.SIGKILL)
    killed_s = time.monotonic()
    events = drain(gang)
    assert time.monotonic() - killed_s < 5.0
    assert not any(map(is_alive, gang.pids.values()))
    cause = gang.outcome().first_cause
    assert (cause.kind, cause.rank, cause.signal) == ("process_death", 3, signal.SIGKILL)
    assert gang.outcome().state == "failed"
    assert next(event.rank for event in events if event.kind == "exit") == 3


def test_gang_peers_end_even_when_nobody_reads_events(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "wait_deaf")
    wait_for_phases(gang)
    os.kill(gang.pids[0], signal.SIGSEGV)
    wait_until(lambda: not any(map(is_alive, gang.pids.values())), 5.0, "peers gone")
    assert gang.end(0.0).first_cause.signal == signal.SIGSEGV


def test_gang_user_error_is_the_cause_in_one_line(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "raise_user_error", 4)
    drain(gang)
    cause = gang.outcome().first_cause
    assert (cause.kind, cause.rank) == ("user_error", 1)
    assert cause.message == "[model] dim is 7: expected a multiple of 8; set it to 8"
    assert [death.exit_code for death in gang.outcome().exits if death.rank == 1] == [2]


def test_gang_outside_error_is_storage(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "raise_outside", 2)
    drain(gang)
    assert gang.outcome().first_cause.kind == "storage"


def test_gang_exit_without_a_word_is_a_process_death(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "leave_silently", 4)
    drain(gang)
    cause = gang.outcome().first_cause
    assert (cause.kind, cause.rank, cause.exit_code) == ("process_death", 2, 7)


def test_gang_entry_that_does_not_exist_is_a_user_error(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "no_such_function", 2)
    drain(gang)
    assert gang.outcome().first_cause.kind == "user_error"


def test_gang_system_exit_zero_is_a_return(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "exit_politely", 2)
    drain(gang)
    assert gang.outcome().ok


def test_gang_rank_whose_process_ends_before_its_entry_returned_is_no_success(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "leave_with_zero", 2)
    drain(gang)
    outcome = gang.outcome()
    assert outcome.state == "failed"
    assert (outcome.first_cause.kind, outcome.first_cause.rank) == ("process_death", 1)
    assert "exited with code 0 without a word" in outcome.first_cause.message


def test_gang_log_keeps_the_traceback(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "raise_outside", 1)
    drain(gang)
    assert "the store is gone" in gang.order.log_path(0).read_text()


def test_gang_end_with_grace_lets_ranks_commit(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "commit_on_sigterm", 8)
    wait_for_phases(gang)
    outcome = gang.end(30.0)
    assert (outcome.state, outcome.first_cause) == ("stopped", None)
    assert {event.rank for event in gang.events(0.0) if event.kind == "committed"} == set(range(8))


def test_gang_end_of_deaf_ranks_kills_them_after_the_grace(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "wait_deaf", 8)
    wait_for_phases(gang)
    outcome = gang.end(0.2)
    assert (outcome.state, outcome.first_cause.kind) == ("stopped", "interrupted")
    assert {death.signal for death in outcome.exits} == {signal.SIGKILL}


def test_gang_second_while_the_first_lives_is_refused_and_harms_nobody(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "wait_forever", 2)
    wait_for_phases(gang)
    with pytest.raises(GangBusyError):
        start(plain_server, tmp_path, "echo", 2)
    assert gang.alive == (0, 1) and all(map(is_alive, gang.pids.values()))
    gang.end(0.0)


def test_gang_child_of_a_rank_ends_with_it(plain_server):
    results = run_gang(plain_server, 2, "gang_entries:leave_a_child")
    children = [result["child"] for result in results]
    wait_until(lambda: not any(map(is_alive, children)), 5.0, f"{children} gone")


def test_rank_holds_no_descriptor_of_its_peers(plain_server):
    results = run_gang(plain_server, 8, "gang_entries:open_descriptors")
    pipes = [{target for target in result["targets"] if target.startswith("pipe:")} for result in results]
    sockets = [[target for target in result["targets"] if target.startswith("socket:")] for result in results]
    assert [len(own) for own in pipes] == [1] * 8 and len(set.union(*pipes)) == 8
    assert [len(own) for own in sockets] == [1, *[0] * 7]  # rank 0: the listening socket of the store


def test_gang_stacks_show_a_rank_blocked_in_c(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "wait_deaf", 4)
    wait_for_phases(gang)
    stacks = gang.stacks(10.0)
    assert set(stacks) == set(range(4))
    assert all("in wait_forever" in stack for stack in stacks.values())
    again = gang.stacks(10.0)
    assert all(stack.count("in wait_forever") == 1 for stack in again.values())
    gang.end(0.0)


def test_gang_stacks_leave_out_a_rank_that_is_stopped(plain_server, tmp_path):
    gang = start(plain_server, tmp_path, "wait_deaf", 4)
    wait_for_phases(gang)
    os.kill(gang.pids[0], signal.SIGSTOP)
    assert set(gang.stacks(2.0)) == {1, 2, 3}
    gang.end(0.0)


def test_gang_debug_rank_talks_to_the_terminal(plain_server, tmp_path):
    terminal, theirs = pty.openpty()
    gang = plain_server.start(GangOrder(2, "gang_entries:ask_terminal", tmp_path, debug_rank=0), theirs)
    os.close(theirs)
    seen = b""
    while b"your name?" not in seen:
        seen += os.read(terminal, 1000)
    os.write(terminal, b"Ada\n")
    answers = [event.fields for event in drain(gang) if event.kind == "result"]
    os.close(terminal)
    assert answers == [{"answer": "Ada", "tty": True}]
    assert gang.order.log_path(1).exists() and not gang.order.log_path(0).exists()


def test_gang_of_a_parent_with_more_descriptors_than_select_takes():
    """As an agent's may be that holds many gangs, logs and connections: select(2) takes none above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 1200, "this machine lets a process hold too few descriptors"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1024)]
    try:
        with ForkServer((), {"PYTHONPATH": str(Path(__file__).parent)}) as server:
            results = run_gang(server, 2, "gang_entries:echo", {"a": 1})
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [result["rank"] for result in results] == [0, 1]


def test_server_that_is_not_ready_in_time_says_how_to_wait_longer(tmp_path):
    told = pytest.raises(OutsideError, match=r"no answer within 0 s; set deadlines\.init_s higher")
    with ForkServer((), ready_deadline_s=0.0, remedy="set deadlines.init_s higher") as server, told:
        start(server, tmp_path, "echo", 1)


def test_server_death_ends_the_ranks_and_is_reported(tmp_path):
    with ForkServer((), {"PYTHONPATH": str(Path(__file__).parent)}) as server:
        gang = start(server, tmp_path / "1", "wait_deaf")
        wait_for_phases(gang)
        first_pid = server.pid
        os.kill(first_pid, signal.SIGKILL)
        killed_s = time.monotonic()
        events = drain(gang)
        assert time.monotonic() - killed_s < 5.0
        wait_until(lambda: not any(map(is_alive, gang.pids.values())), 1.0, "ranks gone")
        assert [event.kind for event in events] == ["server_lost"]
        assert "fork server died" in gang.outcome().first_cause.message
        second = start(server, tmp_path / "2", "echo", 2)
        drain(second)
        assert second.outcome().ok and server.pid != first_pid


def test_server_closed_while_a_gang_lives_ends_it(tmp_path):
    with ForkServer((), {"PYTHONPATH": str(Path(__file__).parent)}) as server:
        gang = start(server, tmp_path, "wait_deaf", 4)
        wait_for_phases(gang)
        pid = server.pid
    assert not any(map(is_alive, [pid, *gang.pids.values()]))
    outcome = gang.end(0.0)
    assert (outcome.state, outcome.first_cause.kind) == ("failed", "process_death")


def test_server_ignores_the_signals_of_a_service_manager(tmp_path):
    with ForkServer((), {"PYTHONPATH": str(Path(__file__).parent)}) as server:
        gang = start(server, tmp_path, "commit_on_sigterm", 4)
        wait_for_phases(gang)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(server.pid, signum)
        for pid in gang.pids.values():
            os.kill(pid, signal.SIGTERM)
        assert len([event for event in drain(gang) if event.kind == "committed"]) == 4
        assert gang.outcome().state == "stopped"


def test_server_started_in_a_folder_with_names_of_the_standard_library_imports_those(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')")
    with ForkServer((), {"PYTHONPATH": str(Path(__file__).parent)}) as server:
        assert [each["rank"] for each in run_gang(server, 2, "gang_entries:echo")] == [0, 1]


def test_server_module_that_cannot_be_imported_is_a_user_error(tmp_path):
    with ForkServer(("no_such_module_here",)) as server, pytest.raises(PhalanxError, match="no_such_module_here"):
        start(server, tmp_path, "echo", 1)


def test_server_module_that_starts_a_thread_is_refused_by_name(tmp_path):
    (tmp_path / "threading_at_import.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    environ = {"PYTHONPATH": str(tmp_path)}
    with ForkServer(("threading_at_import",), environ) as server, pytest.raises(PhalanxError, match="starts threads"):
        start(server, tmp_path, "echo", 1)


def test_server_that_does_not_answer_is_an_outside_error(tmp_path):
    with ForkServer((), ready_deadline_s=0.3) as server:
        os.kill(server.pid, signal.SIGSTOP)
        pid = server.pid
        with pytest.raises(OutsideError, match="no answer within"):
            start(server, tmp_path, "echo", 1)
    assert not is_alive(pid)


def test_gang_of_a_server_that_is_stopped_ends_with_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.gang.gang.KILL_DEADLINE_S", 0.5)
    with ForkServer((), {"PYTHONPATH": str(Path(__file__).parent)}) as server:
        gang = start(server, tmp_path, "wait_forever", 4)
        wait_for_phases(gang)
        os.kill(server.pid, signal.SIGSTOP)
        assert gang.end(0.2).state == "stopped"
        wait_until(lambda: not any(map(is_alive, gang.pids.values())), 5.0, "the ranks outlive their server")


def test_fifty_gangs_in_a_row_leak_neither_descriptors_nor_processes(plain_server, tmp_path):
    def descriptors(pid: int) -> int:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    run_gang(plain_server, 8, "gang_entries:echo")
    before = descriptors(os.getpid()), descriptors(plain_server.pid)
    pids = []
    for number in range(50):
        gang = start(plain_server, tmp_path / str(number), "wait_forever" if number % 2 else "echo")
        pids += gang.pids.values()
        if number % 2:
            os.kill(gang.pids[number % 8], signal.SIGKILL)
            gang.end(0.0)
        else:
            drain(gang)
    assert (descriptors(os.getpid()), descriptors(plain_server.pid)) == before
    assert not any(map(is_alive, pids))
    assert list(Path(f"/proc/{plain_server.pid}/task").iterdir()) == [
        Path(f"/proc/{plain_server.pid}/task/{plain_server.pid}")
    ]
    children = Path(f"/proc/{plain_server.pid}/task/{plain_server.pid}/children").read_text().split()
    assert children == []
