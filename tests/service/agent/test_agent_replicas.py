"""Shares from node to node over TLS: whole or not at all, within the memory's limit, for those alone who may."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import socket

import pytest

from phalanx.agent.replica_client import push
from phalanx.agent.replica_server import ReplicaServer
from phalanx.agent.replicas import Head, Held, ReplicaMemory
from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, ObjectRef
from phalanx.rpc import Role
from phalanx.rpc.testing import make_cluster
from phalanx.snapshot.replicas import Kept, Placed

JOB, DEADLINE_S = "projects/p/jobs/j", 30.0
SIZES = (5 << 20, 17)
pytestmark = pytest.mark.timeout(90)


def share(step=5, attempt=2, rank=0, sealed=0, damaged=False, sizes=SIZES):
    """A share of two objects, and its memory."""
    memory = mmap.mmap(-1, sum(sizes))
    placed, at = [], 0
    for number, size in enumerate(sizes):
        memory[at : at + size] = bytes([step + number]) * size
        placed.append(Placed(ObjectRef(f"a{attempt}/s{step}/{number}", size, xxh3(memory[at : at + size])), at))
        at += size
    if damaged:
        memory[0] ^= 1
    head = Head(JOB, Kept(CheckpointRef(attempt, step), rank, 2), sealed, tuple(placed), at, b"draft")
    return Held(head, memory)


@pytest.fixture
def cluster(tmp_path):
    return make_cluster(tmp_path)


@pytest.fixture
def node(cluster):
    """A node's memory that others reach."""
    memory = ReplicaMemory(3 * sum(SIZES))
    server = ReplicaServer(memory, cluster.service("agent").security, "127.0.0.1")
    yield memory, server.address
    server.close()


def send(cluster, address, held, *, role=Role.AGENT, attempt=2, job="j", name="agent-b", deadline_s=DEADLINE_S):
    credentials = cluster.credentials(role, "p", job, attempt, name=name)
    push(address, credentials, cluster.tokens.mint(name, role, "p", job, attempt), held, deadline_s)


def test_share_that_was_sent_lies_whole_with_the_partner(cluster, node):
    memory, address = node
    sent = share()
    send(cluster, address, sent)
    (held,) = memory.held(JOB, CheckpointRef(2, 5))
    assert held.head == sent.head and held.memory[:] == sent.memory[:]
    assert memory.kept(JOB) == [Kept(CheckpointRef(2, 5), 0, 2)]
    send(cluster, address, sent)
    assert memory.num_bytes == sum(SIZES), "sent again it is one share"


def test_sealed_step_stays_until_the_next_one_is(cluster, node):
    memory, address = node
    for step, sealed, stay in ((5, 0, [5]), (10, 5, [5, 10]), (15, 10, [10, 15]), (20, 10, [10, 20])):
        send(cluster, address, share(step, sealed=sealed))
        assert [kept.ref.step for kept in memory.kept(JOB)] == stay
    send(cluster, address, share(3, attempt=3), attempt=3)
    assert [kept.ref for kept in memory.kept(JOB)] == [CheckpointRef(3, 3)], "an older attempt's leave"
    with pytest.raises(OutsideError):
        send(cluster, address, share(25))
    assert [kept.ref for kept in memory.kept(JOB)] == [CheckpointRef(3, 3)]


def test_share_with_a_wrong_byte_is_refused_and_nothing_of_it_stays(cluster, node):
    memory, address = node
    with pytest.raises(OutsideError, match="other bytes"):
        send(cluster, address, share(damaged=True))
    assert memory.kept(JOB) == [] and memory.num_bytes == 0


def test_share_without_room_is_refused(cluster, node):
    memory, address = node
    with pytest.raises(OutsideError):
        send(cluster, address, share(sizes=(4 * SIZES[0],)))
    assert memory.num_bytes == 0


@pytest.mark.parametrize(
    "caller",
    [{"attempt": 1}, {"attempt": 0}, {"job": "other"}, {"role": Role.VIEWER}, {"name": "viewer"}],
    ids=lambda caller: next(iter(caller)),
)
def test_share_of_one_who_may_not_is_refused(cluster, node, caller):
    memory, address = node
    with pytest.raises(OutsideError):
        send(cluster, address, share(), **caller)
    assert memory.kept(JOB) == [] and memory.num_bytes == 0


def test_share_is_not_given_to_one_who_is_no_agent(cluster):
    server = ReplicaServer(ReplicaMemory(1 << 30), cluster.service("monitor").security, "127.0.0.1")
    try:
        with pytest.raises(OutsideError, match="no agent"):
            send(cluster, server.address, share())
    finally:
        server.close()


def test_node_that_does_not_listen_or_answer_is_told_within_the_deadline(cluster):
    with pytest.raises(OutsideError, match="not reached"):
        send(cluster, f"127.0.0.1:{_free_port()}", share(), deadline_s=5.0)
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(OutsideError, match="timed out"):
        send(cluster, f"127.0.0.1:{deaf.getsockname()[1]}", share(), deadline_s=0.2)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _sender(folder, address, reached):
    """Sends a share of which the second half never comes."""

    class Torn(Held):
        """Says that it is half-way, and waits there for its end."""

        def view(self, each):
            if each is self.head.objects[1]:
                reached.send(True)
                signal.pause()
            return super().view(each)

    held = share()
    send(make_cluster(folder), address, Torn(held.head, held.memory))


def test_sender_killed_midway_leaves_nothing_and_the_memory_is_free_again(cluster, node, tmp_path):
    memory, address = node
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_sender, args=(tmp_path, address, there))
    process.start()
    assert here.poll(DEADLINE_S) and here.recv()
    assert memory.num_bytes == sum(SIZES) and memory.kept(JOB) == []
    os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE_S)
    send(cluster, address, share())
    assert memory.num_bytes == sum(SIZES) and len(memory.kept(JOB)) == 1


def test_memory_refuses_objects_that_overlap():
    held = share()
    first, second = held.head.objects
    head = Head(JOB, held.head.kept, 0, (first, Placed(second.ref, 3)), held.head.num_bytes)
    with pytest.raises(PhalanxError, match="one behind the other"):
        ReplicaMemory(1 << 30).begin(head)
