"""A share taken into memory is what a save would have created, and a restore reads it without storage."""

from __future__ import annotations

import mmap

import pytest
from saved_job import (
    draft,
    emptied,
    file_store,
    open_attempt,
    rows_of,
    same_bits,
    save,
    some_tensors,
    whole_of,
)

from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.objects import StoreError
from phalanx.snapshot import commit
from phalanx.snapshot.parts import Part
from phalanx.snapshot.replica_share import ReplicaCapture
from phalanx.snapshot.replica_store import ReplicaStore
from phalanx.snapshot.restore import restore

WORLD, DEADLINE_S = 3, 30.0
pytestmark = pytest.mark.timeout(60)


class Job:
    """A step that lies in memory alone, and in a save of another job of the same state."""

    def __init__(self, folder):
        self.store, self.saved = file_store(folder / "memory"), file_store(folder / "saved")
        self.tensors = some_tensors()
        layout = rows_of(self.tensors, WORLD)
        attempt = open_attempt(self.store)
        open_attempt(self.saved)
        self.ref = CheckpointRef(attempt, 3)
        save(self.saved, attempt, 3, layout)
        self.held = {}
        for rank, held in enumerate(layout):
            self._take(rank, held)

    def _take(self, rank, held):
        capture = ReplicaCapture(Part(self.ref.attempt, 3, rank, WORLD, (), ()), held, lambda store: ())
        taken = capture.result.result(DEADLINE_S)
        memory = mmap.mmap(taken.fd, taken.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        capture.close()
        self.held |= {each.ref.key: memoryview(memory)[each.place] for each in taken.objects}

    def stored(self):
        """The manifest, once all objects lie in storage."""
        for key, view in self.held.items():
            self.store.create(key, view)
        return commit(Lineage(self.store), self.store, draft(self.ref.attempt, 3), WORLD, DEADLINE_S)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_share_in_memory_is_byte_for_byte_what_a_save_creates(job):
    created = {info.key: job.saved.read(info.key) for info in job.saved.list(keys.checkpoint(job.ref))}
    created.pop(keys.manifest(job.ref))
    assert {key: bytes(view) for key, view in job.held.items()} == created
    assert list(job.store.list(keys.checkpoint(job.ref))) == [], "and creates nothing"


def test_restore_from_memory_reads_no_tensor_from_storage_and_is_bit_equal(job):
    manifest = job.stored()
    for info in list(job.store.list(keys.objects(job.ref))):
        job.store.delete(info.key)
    tensors = emptied(job.tensors)
    restore(ReplicaStore(job.store, job.held), manifest, whole_of(tensors))
    assert all(same_bits(tensors[name], tensor) for name, tensor in job.tensors.items())


def test_what_is_not_in_memory_comes_from_storage(job):
    manifest = job.stored()
    prefix = keys.objects(job.ref)
    half = {
        key: view for number, (key, view) in enumerate(job.held.items()) if number % 2 or not key.startswith(prefix)
    }
    tensors = emptied(job.tensors)
    replicas = ReplicaStore(job.store, half)
    restore(replicas, manifest, whole_of(tensors))
    assert all(same_bits(tensors[name], tensor) for name, tensor in job.tensors.items())
    assert replicas.num_bytes > 0


def test_replicas_are_read_only(job):
    replicas, key = ReplicaStore(job.store, job.held), next(iter(job.held))
    for act in (lambda: replicas.create(key, b""), lambda: replicas.writer(key), lambda: replicas.delete(key)):
        with pytest.raises(StoreError, match="read only"):
            act()
    assert replicas.read(key, 1, 2) == bytes(job.held[key][1:3])
    assert replicas.info(key).num_bytes == len(job.held[key])
