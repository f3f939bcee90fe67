"""Restoring a sealed step from the memory of nodes: a node is lost, and no tensor data is read from storage."""

from __future__ import annotations

import pytest
from saved_job import emptied, file_store, open_attempt, rows_of, same_bits, save, some_tensors, whole_of

from phalanx.agent.replicas import ReplicaMemory
from phalanx.core.errors import OutsideError
from phalanx.lineage import ObjectRef, keys
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.parts import parse_part
from phalanx.snapshot.replica_store import ReplicaStore
from phalanx.snapshot.replicas import is_sealed, keepers, owners, sources
from phalanx.snapshot.restore import restore

NODES, RANKS_A_NODE = ("a", "b", "c"), 2
PIECE = 100_000


class Nodes:
    """Three nodes of two ranks that keep one saved step; its tensor data is in storage no more."""

    def __init__(self, folder):
        self.store = file_store(folder)
        self.tensors = some_tensors()
        layout = rows_of(self.tensors, len(NODES) * RANKS_A_NODE)
        self.manifest = save(self.store, open_attempt(self.store), 3, layout, object_bytes=1 << 20)
        self.ref = self.manifest.ref
        self.memory = {node: ReplicaMemory(owners(node, NODES), 1 << 30) for node in NODES}
        self.alive = set(NODES)
        self.shares = {node: self._share(number) for number, node in enumerate(NODES)}
        self.objects = {ref.key: ref for share in self.shares.values() for ref in share}
        for owner, kept in keepers(NODES).items():
            for keeper in kept:
                self._send(owner, keeper)
        for info in list(self.store.list(keys.objects(self.ref))):
            self.store.delete(info.key)

    def _share(self, number):
        ranks = range(number * RANKS_A_NODE, (number + 1) * RANKS_A_NODE)
        parts = [parse_part(key, self.store.read(key)) for key in (keys.part(self.ref, rank) for rank in ranks)]
        return [ObjectRef(each.key, each.num_bytes, each.digest) for part in parts for each in part.objects]

    def _send(self, owner, keeper):
        memory = self.memory[keeper]
        memory.begin(self.ref, owner, self.shares[owner])
        for each in self.shares[owner]:
            data = self.store.read(each.key)
            for at in range(0, len(data), PIECE):
                memory.write(self.ref, owner, each.key, at, data[at : at + PIECE])
        memory.finish(self.ref, owner)

    def copies(self):
        return {copy for node in self.alive for copy in self.memory[node].copies(node).get(self.ref, ())}

    def holders_of(self, key):
        owner = next(owner for owner, share in self.shares.items() if key in {each.key for each in share})
        return [self.memory[node] for node in keepers(NODES)[owner] if node in self.alive]

    def replicas(self):
        return ReplicaStore(self.store, self.ref, self.objects, self.holders_of)


@pytest.fixture
def nodes(tmp_path):
    return Nodes(tmp_path)


def restored(nodes):
    """All tensors as one process restores them."""
    tensors = emptied(nodes.tensors)
    restore(nodes.replicas(), nodes.manifest, whole_of(tensors))
    return tensors


def test_step_that_lies_with_all_keepers_is_sealed(nodes):
    assert is_sealed(NODES, nodes.copies())
    nodes.alive.discard("b")
    assert not is_sealed(NODES, nodes.copies())


@pytest.mark.parametrize("dead", [None, *NODES])
def test_restore_after_the_loss_of_any_node_is_bit_equal_and_needs_no_tensor_of_storage(nodes, dead):
    nodes.alive.discard(dead)
    assert sources(NODES, nodes.copies(), nodes.alive) is not None
    assert list(nodes.store.list(keys.objects(nodes.ref))) == []
    found = restored(nodes)
    assert all(same_bits(found[name], tensor) for name, tensor in nodes.tensors.items())


def test_restore_by_another_layout_reads_the_same_replicas(nodes):
    nodes.alive.discard("a")
    tensors = emptied(nodes.tensors)
    for held in rows_of(tensors, 4):
        restore(nodes.replicas(), nodes.manifest, held)
    assert all(same_bits(tensors[name], tensor) for name, tensor in nodes.tensors.items())


def test_restore_after_the_loss_of_a_node_and_its_partner_fails_and_says_so(nodes):
    nodes.alive -= {"a", "b"}
    assert sources(NODES, nodes.copies(), nodes.alive) is None
    with pytest.raises(OutsideError, match="its share is lost"):
        restored(nodes)


def test_restore_from_a_node_that_fails_asks_the_next(nodes, monkeypatch):
    asked = []

    class Failing:
        def read(self, ref, key, offset, length):
            asked.append(key)
            raise OutsideError("node a does not answer")

    kept = nodes.holders_of
    monkeypatch.setattr(nodes, "holders_of", lambda key: [Failing(), *kept(key)])
    found = restored(nodes)
    assert asked and all(same_bits(found[name], tensor) for name, tensor in nodes.tensors.items())


def test_restore_of_a_flipped_bit_in_memory_is_refused(nodes, monkeypatch):
    """Case 7: what lies in memory is verified by the same digests as what lies in storage."""
    kept = nodes.holders_of

    class Flipping:
        def __init__(self, memory):
            self.memory = memory

        def read(self, ref, key, offset, length):
            data = bytearray(self.memory.read(ref, key, offset, length))
            data[-1] ^= 1
            return bytes(data)

    monkeypatch.setattr(nodes, "holders_of", lambda key: [Flipping(each) for each in kept(key)])
    with pytest.raises(DamagedCheckpoint, match="other bytes than were written"):
        restored(nodes)


def test_replicas_are_read_only_and_know_their_own_objects_alone(nodes):
    store, key = nodes.replicas(), next(iter(nodes.objects))
    for act in (lambda: store.create(key, b""), lambda: store.writer(key), lambda: store.delete(key)):
        with pytest.raises(OutsideError, match="read only"):
            act()
    with pytest.raises(OutsideError, match="in no share"):
        store.read(f"{keys.objects(nodes.ref)}99999999-00000000.safetensors")
    with pytest.raises(OutsideError, match="were asked of an object"):
        store.read(key, 0, nodes.objects[key].num_bytes + 1)
    assert store.info(key).num_bytes == nodes.objects[key].num_bytes
    assert store.read(keys.manifest(nodes.ref)) == nodes.store.read(keys.manifest(nodes.ref))
