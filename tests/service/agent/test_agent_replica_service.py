"""Shares over the wire: they come whole or not at all, only for those who hold the attempt's token."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from phalanx.agent.replica_client import PeerMemory
from phalanx.agent.replica_server import ACCESS, ReplicaServer
from phalanx.agent.replicas import PIECE_BYTES, ReplicaMemory, share_digest
from phalanx.api.agent.v1 import replica_service_pb2 as pb
from phalanx.api.agent.v1.replica_service_pb2_grpc import add_ReplicaServiceServicer_to_server
from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, ObjectRef
from phalanx.rpc import Denied, Role, connect, serve
from phalanx.rpc.server import access_problems
from phalanx.rpc.testing import make_cluster

JOB, REF, DEADLINE_S = "projects/p/jobs/j", CheckpointRef(2, 5), 60.0
DATA = {f"a2/s5/objects/{at}": bytes([at + 1]) * (PIECE_BYTES + 7 + at) for at in range(2)}
OBJECTS = [ObjectRef(key, len(data), xxh3(data)) for key, data in DATA.items()]


@pytest.fixture
def memory():
    return ReplicaMemory(("a", "d"), 1 << 30)


@pytest.fixture
def peer(tmp_path, memory):
    """Makes clients of a node's memory: by role and scope of their token."""
    cluster = make_cluster(tmp_path)

    def memory_of(job):
        assert job == JOB
        return memory

    with ExitStack() as ending:
        adders = [lambda server: add_ReplicaServiceServicer_to_server(ReplicaServer(memory_of), server)]
        server = ending.enter_context(serve(cluster.service("agent"), adders, ACCESS))

        def client(attempt=2, role=Role.AGENT, job="j"):
            credentials = cluster.credentials(role, "p", job, attempt, name=f"agent-{role}-{job}-{attempt}")
            channel = ending.enter_context(connect("agent", server.address, credentials))
            return PeerMemory(channel, JOB, attempt)

        client.stop = lambda: server.stop(0.0)
        yield client


def put(client, data=DATA, owner="a"):
    return client.put(REF, owner, OBJECTS, lambda each: memoryview(data[each.key]), DEADLINE_S)


def test_access_names_every_method_of_the_replicas():
    assert access_problems(ACCESS, [pb.DESCRIPTOR.services_by_name["ReplicaService"]]) == []


def test_share_sent_to_a_partner_lies_there_whole_and_is_read_back(peer, memory):
    client = peer()
    assert put(client) == share_digest(OBJECTS) == put(client), "sent again it is one share"
    for key, data in DATA.items():
        assert client.read(REF, key, 0, len(data)) == data
        assert client.read(REF, key, 5, PIECE_BYTES) == data[5 : 5 + PIECE_BYTES]
    assert {copy.owner for copy in memory.copies("b")[REF]} == {"a"}
    assert peer(attempt=3).read(REF, OBJECTS[0].key, 0, 3) == DATA[OBJECTS[0].key][:3], "the next attempt restores"


def test_share_with_a_wrong_byte_is_refused_and_nothing_of_it_stays(peer, memory):
    wrong = {key: data[:-1] + b"\x00" for key, data in DATA.items()}
    with pytest.raises(OutsideError, match="did not come whole"):
        put(peer(), wrong)
    assert memory.copies("b") == {} and memory.num_bytes == 0


def test_share_broken_off_midway_counts_for_nothing_and_comes_again(peer, memory):
    class Torn(Exception):
        """What ends the sender."""

    def torn(each):
        if each is OBJECTS[1]:
            raise Torn
        return memoryview(DATA[each.key])

    client = peer()
    with pytest.raises((Torn, OutsideError, PhalanxError)):
        client.put(REF, "a", OBJECTS, torn, DEADLINE_S)
    assert memory.copies("b") == {}
    assert put(client) == share_digest(OBJECTS)


@pytest.mark.parametrize(
    "scope", [{"attempt": 0}, {"attempt": 1}, {"attempt": 2, "job": "other"}, {"role": Role.VIEWER}]
)
def test_share_of_one_without_the_token_of_the_attempt_is_denied(peer, memory, scope):
    with pytest.raises(Denied):
        put(peer(**scope))
    assert memory.num_bytes == 0


def test_read_of_a_node_that_is_gone_fails_and_says_so(peer):
    client = peer()
    put(client)
    peer.stop()
    with pytest.raises(OutsideError):
        client.read(REF, OBJECTS[0].key, 0, 3)
