"""What is made of steps in the memory of nodes before an attempt is opened."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest
from phalanx.objects import open_store
from phalanx.snapshot.replicas import Kept
from phalanx.train.replicas import partner_address, store_newest

DIGEST, JOB, DEADLINE_S = "sha256:" + "0" * 64, "projects/p/jobs/j", 5.0
pytestmark = pytest.mark.timeout(30)


class Nodes:
    """Nodes that answer what they keep, and note what they are asked to store. dead: those that give no answer."""

    def __init__(self, kept, dead=()):
        self._kept, self._dead, self.asked = kept, dead, []

    def nodes(self):
        return [SimpleNamespace(node_id=name, instance_id="i", is_connected=True) for name in self._kept]

    def kept_shares(self, to, job, deadline_s):
        if to.node_id in self._dead:
            raise OutsideError("no answer")
        return self._kept[to.node_id]

    def store_shares(self, to, key, step, deadline_s, *, commit):
        assert key.attempt == 1
        self.asked.append((to.node_id, step, commit))


def kept(step, *ranks, attempt=1):
    return tuple(Kept(CheckpointRef(attempt, step), rank, 2) for rank in ranks)


@pytest.fixture
def lineage(tmp_path):
    lineage = Lineage(open_store(f"file://{tmp_path}"))
    lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={}, request_id="first")
    return lineage


def commit(lineage, step):
    lineage.commit(Manifest(1, step, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(step, step), {}, (), ()))


def stored(nodes, lineage, avoid_from=0, request_id="second"):
    start = SimpleNamespace(request_id=request_id, avoid_from=avoid_from)
    return store_newest(nodes, lineage, JOB, start, DEADLINE_S)


def test_newest_whole_step_is_stored_by_its_holders_and_then_committed_by_the_one_with_rank_0(lineage):
    nodes = Nodes({"a": kept(5, 0, 1) + kept(10, 1), "b": kept(5, 0, 1) + kept(10, 0), "c": ()})
    assert stored(nodes, lineage) == CheckpointRef(1, 10)
    assert sorted(nodes.asked[:2]) == [("a", 10, False), ("b", 10, False)] and nodes.asked[2:] == [("b", 10, True)]


def test_step_that_is_not_whole_with_the_living_is_left_for_the_one_before(lineage):
    nodes = Nodes({"a": kept(5, 0, 1) + kept(10, 1), "b": kept(10, 0)}, dead=("b",))
    assert stored(nodes, lineage) == CheckpointRef(1, 5)


@pytest.mark.parametrize("case", ["older", "avoided", "other attempt", "opened already", "torn"])
def test_nothing_is_stored(lineage, case):
    if case == "older":
        commit(lineage, 10)
    shares = kept(10, 0) if case == "torn" else kept(10, 0, 1, attempt=2 if case == "other attempt" else 1)
    nodes = Nodes({"a": shares})
    avoid_from, request_id = 8 if case == "avoided" else 0, "first" if case == "opened already" else "second"
    assert stored(nodes, lineage, avoid_from, request_id) is None and nodes.asked == []


def test_partner_is_the_next_node_of_the_attempt_that_keeps_shares():
    start = SimpleNamespace(placement=[SimpleNamespace(node_id=name) for name in "ab"])
    nodes = [
        SimpleNamespace(node_id=name, inventory=SimpleNamespace(replica_address=address))
        for name, address in (("a", "h:1"), ("b", ""))
    ]
    assert partner_address("b", start, nodes) == "h:1" and partner_address("a", start, nodes) == ""
