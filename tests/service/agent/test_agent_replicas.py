"""Shares from node to node over TLS: whole or not at all, within the memory's limit, for those alone who may."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import socket
import time

import pytest

from phalanx.agent import replica_server
from phalanx.agent.replica_client import push
from phalanx.agent.replica_reader import ReplicaReader
from phalanx.agent.replica_server import ReplicaServer
from phalanx.agent.replica_wire import Wire
from phalanx.agent.replicas import Head, Held, ReplicaMemory, check_digests
from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, ObjectRef, keys
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
        key = keys.tensors(CheckpointRef(attempt, step), keys.number(rank), number)
        placed.append(Placed(ObjectRef(key, size, xxh3(memory[at : at + size])), at))
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


def kept_by(node, *shares):
    """A node's memory with these shares in it."""
    memory, _ = node
    for each in shares:
        memory.begin(each.head)
        memory.finish(each)


def read(
    cluster,
    *addresses,
    key="a00000002/s00000005/objects/00000000-00000000.safetensors",
    offset=0,
    length=9,
    attempt=3,
    job="j",
    role=Role.AGENT,
    deadline_s=DEADLINE_S,
    reader=None,
):
    """Bytes of an object and its size, as a node without memory of the job gets them."""
    reader = reader or ReplicaReader(cluster.credentials(role, "p", "j", attempt, name="agent-c"))
    token, into = cluster.tokens.mint("agent-c", role, "p", job, attempt), bytearray(length)
    size = reader.read(JOB, addresses, token, key, offset, memoryview(into), deadline_s)
    return bytes(into), size


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


def test_bytes_of_a_share_are_read_from_the_node_that_keeps_it(cluster, node):
    _, address = node
    kept_by(node, share())
    assert read(cluster, address, offset=3) == (b"\5" * 9, SIZES[0])
    assert read(cluster, address, length=0) == (b"", SIZES[0])
    reader = ReplicaReader(cluster.credentials(Role.AGENT, "p", "j", 3, name="agent-c"))
    for _ in range(3):
        assert read(cluster, address, offset=SIZES[0] - 4, length=4, reader=reader)[0] == b"\5" * 4
    with pytest.raises(OutsideError, match="bytes in it"):
        read(cluster, address, offset=SIZES[0], length=1)
    with pytest.raises(OutsideError, match="lie in the memory"):
        read(cluster, address, key="a00000002/s00000005/objects/00000001-00000000.safetensors")


@pytest.mark.parametrize("caller", [{"job": "other"}, {"attempt": 1}, {"role": Role.VIEWER}], ids=str)
def test_bytes_are_not_given_to_one_who_may_not_have_them(cluster, node, caller):
    kept_by(node, share())
    with pytest.raises(OutsideError):
        read(cluster, node[1], **caller)


def test_damage_of_memory_is_the_holders_and_the_next_one_gives_the_bytes(cluster, node):
    kept_by(node, share(damaged=True))
    with pytest.raises(OutsideError, match="other bytes"):
        read(cluster, node[1])
    whole = ReplicaMemory(3 * sum(SIZES))
    server = ReplicaServer(whole, cluster.service("agent").security, "127.0.0.1")
    try:
        kept_by((whole, ""), share())
        assert read(cluster, node[1], server.address)[0] == b"\5" * 9
    finally:
        server.close()


def test_holder_that_is_gone_or_silent_leaves_the_rest_to_the_next(cluster, node):
    kept_by(node, share())
    assert read(cluster, f"127.0.0.1:{_free_port()}", node[1])[0] == b"\5" * 9
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(OutsideError, match="timed out"):
        read(cluster, f"127.0.0.1:{deaf.getsockname()[1]}", deadline_s=0.2)
    with pytest.raises(OutsideError, match="no living node"):
        read(cluster)


def test_memory_of_a_share_that_left_takes_the_next_one(cluster, node):
    memory, address = node
    for step, sealed in ((5, 0), (10, 5), (15, 10), (20, 15), (25, 20)):
        send(cluster, address, share(step, sealed=sealed, sizes=(1 << 20, step)))
    assert memory.allocated_bytes < 4 * (1 << 20) and memory.spare_bytes < 2 * (1 << 20)
    for kept in memory.kept(JOB):
        (held,) = memory.held(JOB, kept.ref)
        check_digests(held)
        held.lend()
    del held
    memory.begin(share(30, attempt=3).head)
    assert memory.spare_bytes == 0 and memory.kept(JOB) == [], "what a process may have mapped is not used again"
    memory.forget(JOB)
    assert memory.num_bytes == memory.spare_bytes == 0


def test_spare_memory_makes_way(cluster, node):
    memory, address = node
    send(cluster, address, share(5))
    send(cluster, address, share(10, sizes=(2 * SIZES[0],)))
    assert memory.spare_bytes == sum(SIZES)
    send(cluster, address, share(15, sealed=10, sizes=(SIZES[0] // 2,)))
    assert memory.num_bytes + memory.spare_bytes <= memory.max_bytes


def _receiver(folder, ready):
    """Takes a share, and is killed once its first object has come."""
    memory = ReplicaMemory(1 << 30)

    class Torn(Wire):
        def receive(self, into):
            super().receive(into)
            if len(into) == SIZES[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    replica_server.Wire = Torn
    ready.send(ReplicaServer(memory, make_cluster(folder).service("agent").security, "127.0.0.1").address)
    signal.pause()


def test_partner_killed_midway_is_known_at_once(cluster, tmp_path):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receiver, args=(tmp_path, there))
    process.start()
    assert here.poll(DEADLINE_S)
    address = here.recv()
    began_s = time.monotonic()
    with pytest.raises(OutsideError):
        send(cluster, address, share(sizes=(SIZES[0], 32 << 20)), deadline_s=600.0)
    assert time.monotonic() - began_s < DEADLINE_S
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
