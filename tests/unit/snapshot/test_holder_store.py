"""What other nodes keep is read from them; what they don't give, from storage, and that is told."""

from __future__ import annotations

import pytest

from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, keys
from phalanx.objects import StoreError
from phalanx.objects.memory import MemoryStore
from phalanx.snapshot.holder_store import HolderStore

REF = CheckpointRef(2, 5)
DATA = bytes(range(100))
OBJECTS = [keys.tensors(REF, keys.number(rank), 0) for rank in (0, 1)]


class Nodes:
    """Other nodes. lost: the share that they don't give any more."""

    def __init__(self):
        self.lost, self.asked = None, []

    def __call__(self, key, offset, length, use):
        self.asked.append(key)
        if key == self.lost:
            raise OutsideError("all are gone")
        if length:
            use(memoryview(DATA)[offset : offset + length])
        return len(DATA)


@pytest.fixture
def nodes():
    return Nodes()


@pytest.fixture
def store(nodes):
    storage = MemoryStore()
    for key in (*OBJECTS, keys.part(REF, 0), keys.manifest(REF), keys.tensors(CheckpointRef(1, 5), keys.number(0), 0)):
        storage.create(key, DATA)
    return HolderStore(storage, REF, nodes)


def test_pieces_and_whole_objects_come_from_other_nodes(store, nodes):
    scratch = memoryview(bytearray(64))
    assert store.read(OBJECTS[0], 10, 20) == DATA[10:30]
    assert store.read_view(OBJECTS[1], 1, 2, scratch) == DATA[1:3]
    assert store.read(keys.part(REF, 0)) == DATA and store.read(OBJECTS[0], 90) == DATA[90:]
    assert store.read(OBJECTS[0], 5, 0) == b""
    assert (store.num_bytes, store.storage_bytes, store.why) == (20 + 2 + 100 + 10, 0, "")


def test_other_steps_and_other_objects_are_read_from_storage_unasked(store, nodes):
    for key in (keys.manifest(REF), keys.tensors(CheckpointRef(1, 5), keys.number(0), 0)):
        assert store.read(key, 1, 3) == DATA[1:4] and store.read(key) == DATA
    assert nodes.asked == [] and store.storage_bytes == 0


def test_share_that_nobody_gives_is_read_from_storage_and_not_asked_for_again(store, nodes, caplog):
    nodes.lost = OBJECTS[0]
    scratch = memoryview(bytearray(64))
    assert store.read(OBJECTS[0], 0, 30) == DATA[:30] and store.read_view(OBJECTS[0], 30, 4, scratch) == DATA[30:34]
    assert store.read(OBJECTS[1], 0, 3) == DATA[:3]
    assert nodes.asked == [OBJECTS[0], OBJECTS[1]]
    assert (store.num_bytes, store.storage_bytes) == (3, 34)
    assert store.why == "share of rank 0: all are gone"
    assert len([each for each in caplog.records if "read from storage" in each.message]) == 1


def test_nothing_is_written(store):
    for act in (lambda: store.create("x", b""), lambda: store.writer("x"), lambda: store.delete(OBJECTS[0])):
        with pytest.raises(StoreError, match="read only"):
            act()
    assert store.info(OBJECTS[0]).num_bytes == 100 and len(list(store.list(keys.objects(REF)))) == 2
