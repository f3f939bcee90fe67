"""Fork servers of several jobs at once: real processes, with no preloaded module."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from typing import Any

import pytest

from phalanx.agent.servers import AWAITED_S, MOST_IDLE, ForkServers
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.gang import ForkServer, GangOrder

CODE, OTHER_CODE = "sha256:a", "sha256:b"
DEADLINE_S = 20.0
pytestmark = pytest.mark.distributed


@dataclass(slots=True)
class Gate:
    """Holds a start in its middle, from when the fork server is ready until `opened`."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


class GatedFolder(PosixPath):
    """A folder for logs whose making waits at a gate."""

    gate: Gate | None = None

    def mkdir(self, *args: Any, **kwargs: Any) -> None:
        if self.gate is not None:
            self.gate.reached.set()
            assert self.gate.opened.wait(DEADLINE_S)
        super().mkdir(*args, **kwargs)


class Clock:
    """A clock that goes when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def servers(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServers]:
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    made = ForkServers((), lambda own_code: CODE, clock=clock)
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def order_in(folder: Path, gate: Gate | None = None) -> GangOrder:
    logs = GatedFolder(folder)
    logs.gate = gate
    return GangOrder(1, "waiting_rank:wait", logs)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.005)


def server_of(servers: ForkServers, job: str) -> ForkServer:
    return servers._servers[job].server


def test_server_whose_start_is_under_way_outlives_the_checks_of_any_number_of_jobs(servers, pool, clock, tmp_path):
    gates = {f"job-{number}": Gate() for number in range(MOST_IDLE + 1)}
    starts = {
        job: pool.submit(servers.start, job, CODE, (), order_in(tmp_path / job, gate)) for job, gate in gates.items()
    }
    assert all(gate.reached.wait(DEADLINE_S) for gate in gates.values())
    clock.now_s += 10 * AWAITED_S
    for number in range(MOST_IDLE + 1):
        servers.warm(f"later-{number}", CODE)
    assert set(gates) < set(servers.jobs)
    for gate in gates.values():
        gate.opened.set()
    gangs = [start.result(DEADLINE_S) for start in starts.values()]
    assert all(gang.alive == (0,) for gang in gangs)


def test_server_of_a_job_that_is_about_to_start_is_kept_until_it_is_overdue(servers, clock, tmp_path):
    jobs = [f"job-{number}" for number in range(MOST_IDLE + 2)]
    for job in jobs:
        servers.warm(job, CODE)
    assert list(servers.jobs) == jobs
    clock.now_s = AWAITED_S - 1.0
    assert servers.start(jobs[0], CODE, (), order_in(tmp_path)).alive == (0,)
    assert set(servers.jobs) == set(jobs)
    clock.now_s = AWAITED_S
    servers.warm("last", CODE)
    assert list(servers.jobs) == [*jobs[-MOST_IDLE:], jobs[0], "last"]  # ranks of the first live, the last is awaited


def test_server_whose_ranks_are_gone_is_idle_and_the_one_used_least_recently_ends(servers, clock, tmp_path):
    jobs = [f"job-{number}" for number in range(MOST_IDLE + 1)]
    gangs = [servers.start(job, CODE, (), order_in(tmp_path / job)) for job in jobs]
    assert list(servers.jobs) == jobs
    for gang in gangs:
        gang.end(0.0)
    servers.warm("next", CODE)
    assert list(servers.jobs) == [*jobs[1:], "next"]


def test_start_of_a_job_that_is_released_meanwhile_is_an_outside_error(servers, pool, tmp_path):
    gate = Gate()
    start = pool.submit(servers.start, "job", CODE, (), order_in(tmp_path, gate))
    assert gate.reached.wait(DEADLINE_S)
    server = server_of(servers, "job")
    release = pool.submit(servers.release, "job")
    wait_until(lambda: not server.is_alive, "the server ends")
    gate.opened.set()
    with pytest.raises(OutsideError, match=r"^the fork server was closed before it had started the gang$"):
        start.result(DEADLINE_S)
    release.result(DEADLINE_S)
    assert servers.start("job", CODE, (), order_in(tmp_path)).alive == (0,)


def test_start_with_other_code_ends_the_one_under_way_and_lives(servers, pool, tmp_path, monkeypatch):
    gate = Gate()
    first = pool.submit(servers.start, "job", CODE, (), order_in(tmp_path / "1", gate))
    assert gate.reached.wait(DEADLINE_S)
    servers.warm("job", OTHER_CODE)  # nothing: what is in use is not replaced by a check
    server = server_of(servers, "job")
    monkeypatch.setattr(servers, "_digest_now", lambda own_code: OTHER_CODE)
    second = pool.submit(servers.start, "job", OTHER_CODE, (), order_in(tmp_path / "2"))
    wait_until(lambda: not server.is_alive, "the server with the old code ends")
    gate.opened.set()
    with pytest.raises(OutsideError, match="closed before"):
        first.result(DEADLINE_S)
    assert second.result(DEADLINE_S).alive == (0,)
    assert servers.jobs == ("job",)


def test_code_that_this_node_lacks_starts_no_server(servers, tmp_path):
    with pytest.raises(PhalanxError, match="with which the attempt was opened"):
        servers.start("job", OTHER_CODE, (), order_in(tmp_path))
    assert servers.jobs == ()


def test_servers_that_are_closed_begin_nothing(servers, tmp_path):
    servers.close()
    servers.warm("job", CODE)
    with pytest.raises(OutsideError, match="job does not start: this agent ends"):
        servers.start("job", CODE, (), order_in(tmp_path))
    assert servers.jobs == ()


def test_close_wakes_a_start_that_waits_for_imports_without_end(tmp_path, pool, monkeypatch):
    (tmp_path / "never_imported.py").write_text("import threading\nthreading.Event().wait()\n")
    with ForkServer(("never_imported",), {"PYTHONPATH": str(tmp_path)}) as server:
        pid = server.pid
        start = pool.submit(server.start, order_in(tmp_path))
        server.close()
        with pytest.raises(OutsideError, match="closed before"):
            start.result(DEADLINE_S)
    assert pid is not None and not is_alive(pid) and not server.is_alive
    with pytest.raises(OutsideError, match="closed before"):
        server.start(order_in(tmp_path))


def test_starts_checks_and_releases_from_many_threads_leave_no_process(servers, pool, tmp_path):
    """Whatever meets, an error is one of those that a person reads, and nothing is left behind."""

    def turn(number: int) -> int:
        job = f"job-{number % 3}"
        if number % 4 == 3:
            servers.release(job)
            return 0
        servers.warm(job, CODE)
        try:
            gang = servers.start(job, CODE, (), order_in(tmp_path / str(number)))
        except OutsideError as error:
            assert "closed before" in str(error)
            return 0
        except RuntimeError as error:
            assert "end the gang that lives" in str(error)
            return 0
        gang.end(0.0)
        return gang.pids[0]

    pids = list(pool.map(turn, range(24)))
    servers.close()
    assert any(pids) and not any(is_alive(pid) for pid in pids if pid) and servers.jobs == ()
