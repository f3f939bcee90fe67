"""What is made of steps in the memory of nodes before an attempt is opened."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest
from phalanx.objects import open_store
from phalanx.snapshot.replicas import Kept
from phalanx.train.launch.base import Holder
from phalanx.train.replicas import NodeMemory, asked, partner_address, store_newest

DIGEST, JOB, DEADLINE_S = "sha256:" + "0" * 64, "projects/p/jobs/j", 5.0
pytestmark = pytest.mark.timeout(30)


class Nodes:
    """Nodes that answer what they keep, and note what they are asked to store. dead: those that give no answer. silent:
    those that never have stored anything. damaged: node and step that can't be stored.
    """

    def __init__(self, kept, dead=(), silent=(), damaged=()):
        self._kept, self._dead, self._silent, self._damaged, self.asked = kept, dead, silent, damaged, []
        self.over = threading.Event()

    def nodes(self):
        return [
            SimpleNamespace(
                node_id=name,
                instance_id="i",
                is_connected=True,
                inventory=SimpleNamespace(replica_address=f"{name}:1"),
            )
            for name in self._kept
        ]

    def kept_shares(self, to, job, deadline_s):
        if to.node_id in self._dead:
            raise OutsideError("no answer")
        return self._kept[to.node_id]

    def store_shares(self, to, key, step, deadline_s, *, commit):
        assert key.attempt == 1
        if (to.node_id, step) in self._damaged:
            raise OutsideError("other bytes")
        if to.node_id in self._silent:
            assert not self.over.wait(20), "the test has ended"
            raise OutsideError("no answer")
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
    return store_newest(nodes, lineage, JOB, start, asked(nodes, JOB), time.monotonic() + DEADLINE_S)


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


def test_holder_that_never_answers_is_not_waited_for_where_others_keep_the_same(lineage):
    nodes = Nodes({"a": kept(5, 0, 1), "b": kept(5, 0), "c": kept(5, 1)}, silent=("a",))
    began_s = time.monotonic()
    assert stored(nodes, lineage) == CheckpointRef(1, 5)
    assert time.monotonic() - began_s < DEADLINE_S
    assert nodes.asked[-1] == ("b", 5, True) and len(nodes.asked) == 3, "who has died does not commit either"


def test_holder_that_never_answers_is_given_up_at_the_deadline(lineage):
    nodes = Nodes({"a": kept(5, 0), "b": kept(5, 1)}, silent=("a",))
    start = SimpleNamespace(request_id="second", avoid_from=0)
    with pytest.raises(OutsideError, match="not stored in time by a"):
        store_newest(nodes, lineage, JOB, start, asked(nodes, JOB), time.monotonic() + 0.2)


def test_step_that_is_damaged_with_all_holders_is_left_for_the_one_before(lineage):
    shares = {name: kept(5, 0, 1) + kept(10, 0, 1) for name in "ab"}
    assert stored(Nodes(shares, damaged=(("a", 10),)), lineage) == CheckpointRef(1, 10), "one holder is enough"
    nodes = Nodes(shares, damaged=(("a", 10), ("b", 10)))
    assert stored(nodes, lineage) == CheckpointRef(1, 5)
    with pytest.raises(OutsideError, match=r"attempt 1 step 10 .*attempt 1 step 5 "):
        stored(Nodes(shares, damaged=[(name, step) for name in "ab" for step in (5, 10)]), lineage)


def test_nodes_are_told_who_else_keeps_the_parent(lineage, tmp_path):
    nodes = Nodes({"a": kept(5, 0, 1) + kept(10, 1), "b": kept(10, 0), "c": ()})
    memory = NodeMemory(nodes, SimpleNamespace(store=lambda name: open_store(f"file://{tmp_path}")))
    assert memory.holders(JOB, CheckpointRef(1, 10), "c") == (), "nothing was asked yet"
    job, start = SimpleNamespace(name=JOB, attempt=1), SimpleNamespace(request_id="second", avoid_from=0)
    memory.store_or_tell(job, start, DEADLINE_S)
    assert memory.holders(JOB, CheckpointRef(1, 10), "c") == (Holder("a:1", (1,)), Holder("b:1", (0,)))
    assert memory.holders(JOB, CheckpointRef(1, 10), "a") == (Holder("b:1", (0,)),)
    assert memory.holders(JOB, CheckpointRef(1, 7), "c") == () and memory.holders(JOB, None, "c") == ()


def test_partner_is_the_next_node_of_the_attempt_that_keeps_shares():
    start = SimpleNamespace(placement=[SimpleNamespace(node_id=name) for name in "ab"])
    nodes = [
        SimpleNamespace(node_id=name, inventory=SimpleNamespace(replica_address=address))
        for name, address in (("a", "h:1"), ("b", ""))
    ]
    assert partner_address("b", start, nodes) == "h:1" and partner_address("a", start, nodes) == ""
