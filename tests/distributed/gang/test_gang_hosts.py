"""One gang over two hosts, each with a fork server of its own: rank 0's host listens, the other is told where."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from gang_waiting import HERE, is_alive

from phalanx.core.errors import PhalanxError
from phalanx.gang import ForkServer, Gang, GangOrder, Rendezvous, first_of_hosts
from phalanx.gang.testing import TEST_PRELOAD

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def second_server() -> Iterator[ForkServer]:
    """Stands for the fork server of another host."""
    with ForkServer(TEST_PRELOAD, {"PYTHONPATH": str(HERE)}) as server:
        yield server


def start_both(first: ForkServer, second: ForkServer, tmp_path, entry: str, **fields) -> tuple[Gang, Gang]:
    """Ranks 0 and 3 on one host, 1 and 2 on the other."""
    order = GangOrder(4, f"gang_entries:{entry}", tmp_path / "first", ranks=(0, 3), **fields)
    one = first.start(order)
    other = second.start(replace(order, ranks=(1, 2), rendezvous=one.rendezvous, log_dir=tmp_path / "second"))
    return one, other


def drain(gang: Gang) -> list:
    events = list(gang.events(60.0))
    assert gang.over, f"ranks {gang.alive} still alive"
    return events


def test_gang_over_two_hosts_meets_and_knows_its_places(fork_server, second_server, tmp_path):
    gangs = start_both(fork_server, second_server, tmp_path, "all_reduce_once")
    results = {event.rank: event.fields for gang in gangs for event in drain(gang) if event.kind == "result"}
    assert [results[rank]["total"] for rank in range(4)] == [6.0] * 4
    assert [results[rank]["local"] for rank in range(4)] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert all(gang.outcome().ok for gang in gangs)


def test_gang_over_two_hosts_death_on_one_ends_the_other_within_5_s_of_being_told(fork_server, second_server, tmp_path):
    one, other = start_both(fork_server, second_server, tmp_path, "wait_deaf")
    for gang in (one, other):
        waiting = set(gang.pids)
        for event in gang.events(30.0):
            waiting -= {event.rank} if event.kind == "phase" else set()
            if not waiting:
                break
    os.kill(one.pids[3], signal.SIGKILL)
    drain(one)
    assert all(map(is_alive, other.pids.values()))
    told_s = time.monotonic()
    ended = other.end(0.0)
    assert time.monotonic() - told_s < 5.0
    assert not any(map(is_alive, other.pids.values()))
    cause = first_of_hosts([ended.first_cause, one.outcome().first_cause])
    assert (cause.kind, cause.rank, cause.signal) == ("process_death", 3, signal.SIGKILL)


def test_gang_over_two_hosts_death_among_collectives_is_told_by_its_own_host(fork_server, second_server, tmp_path):
    one, other = start_both(fork_server, second_server, tmp_path, "all_reduce_until_dead")
    ready = 0
    for event in other.events(60.0):
        ready += event.kind == "phase"
        if ready == 2:
            break
    os.kill(other.pids[1], signal.SIGKILL)
    for gang in (one, other):
        drain(gang)
    causes = [one.outcome().first_cause, other.outcome().first_cause]
    assert first_of_hosts(causes) == causes[1]
    assert (causes[1].kind, causes[1].rank) == ("process_death", 1)


def test_gang_whose_first_host_is_not_there_ends_with_a_lost_peer(second_server, tmp_path):
    order = GangOrder(2, "gang_entries:meet_briefly", tmp_path, ranks=(1,), rendezvous=Rendezvous("127.0.0.1", 9))
    gang = second_server.start(order)
    drain(gang)
    assert gang.outcome().first_cause.kind == "lost_peer"


def test_gang_address_that_is_not_this_hosts_is_a_user_error_and_leaves_the_server_well(plain_server, tmp_path):
    order = GangOrder(2, "gang_entries:echo", tmp_path, ranks=(0,), address="192.0.2.77")
    with pytest.raises(PhalanxError, match="interfaces"):
        plain_server.start(order)
    gang = plain_server.start(replace(order, address="127.0.0.1"))
    drain(gang)
    assert gang.outcome().ok
