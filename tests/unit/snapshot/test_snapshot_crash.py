"""A save, a restore and an opening killed at every operation on their store: the previous state, or the whole new one;
what is left is reclaimed. Where system calls are counted and the death is real: test_snapshot_crash_processes.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from saved_job import (
    DTYPES,
    draft,
    emptied,
    open_attempt,
    random_tensor,
    rows_of,
    same_bits,
    save,
    whole_of,
)
from support.dying import every_death

from phalanx.checkpoint.pruning import prune
from phalanx.checkpoint.retention import Policy
from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.objects import ObjectStore, open_store
from phalanx.snapshot.commit import commit
from phalanx.snapshot.restore import restore
from phalanx.snapshot.verify import verify
from phalanx.snapshot.writer import Writer

Open = Callable[[str], ObjectStore]
Tensors = dict[str, torch.Tensor]
OLD: Tensors = {f"model.{str(dtype)[6:]}": random_tensor((6, 5), dtype, seed) for seed, dtype in enumerate(DTYPES)}
OLD |= {"model.long": random_tensor((90_000,), torch.float32, 9), "optim.step": torch.tensor(7.0)}
NEW = emptied(OLD)
OBJECT_BYTES = 1 << 16  # several objects a rank
STRIDES = {"memory": 1, "file": 1, "s3": 2}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["memory", "file", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fresh(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens an empty job of that name."""
    if kind == "memory":
        return lambda name: open_store(f"memory://{uuid.uuid4().hex}").within(f"projects/p/jobs/{name}")
    root = open_store(tmp_path.as_uri() if kind == "file" else str(request.getfixturevalue("s3_prefix")))
    return lambda name: root.within(f"projects/p/jobs/{name}")


@pytest.fixture
def saved(fresh: Open) -> Open:
    """Opens a new job with one checkpoint, of step 5."""

    def made(name: str) -> ObjectStore:
        store = fresh(name)
        save(store, open_attempt(store), 5, rows_of(OLD, 2), OBJECT_BYTES)
        return store

    return made


def save_as_two_ranks(store: ObjectStore) -> None:
    """Saves step 10, records included, and commits it; returns or raises when no thread works any more."""
    lineage = Lineage(store)
    pending = []
    for rank, held in enumerate(rows_of(NEW, 2)):
        writer = Writer(store, rank, 2, object_bytes=OBJECT_BYTES)
        pending.append(writer.save(1, 10, held, lambda rank=rank: (lineage.records.put(1, rank, 6, 10, None, None),)))
    ends = [upload.result.exception(60) for upload in pending]
    for end in ends:
        if end is not None:
            raise end
    commit(lineage, store, draft(1, 10), 2, 30)


def held_by(store: ObjectStore, ref: CheckpointRef) -> Tensors:
    manifest = Lineage(store).manifest(ref)
    assert verify(store, manifest) == ()
    found = {name: torch.full_like(tensor, 3) for name, tensor in OLD.items()}
    restore(store, manifest, whole_of(found))
    return found


def require_bits(store: ObjectStore, ref: CheckpointRef, expected: Tensors, where: str) -> None:
    found = held_by(store, ref)
    assert all(same_bits(found[name], expected[name]) for name in expected), where


def require_only_whole_checkpoints(store: ObjectStore, where: str) -> None:
    """After a collection nothing of a checkpoint is left but those that exist, and no upload goes on."""
    prune(store, Policy(), dry_run=False, grace_s=0)
    found = [info.key for info in store.list()]
    assert {*map(keys.checkpoint_of, found)} == {*map(keys.manifest_ref, found)}, where
    assert store.uploads() == (), where


def test_save_killed_at_any_operation_leaves_the_previous_checkpoint_or_both(saved: Open, kind: str) -> None:
    """Case 1, 8: commit included; the next attempt saves, and the collector takes what was left."""
    outcomes, num_lives = set(), 0
    for where, store in every_death(saved, save_as_two_ranks, STRIDES[kind]):
        live = Lineage(store).checkpoints()
        assert live in ((CheckpointRef(1, 5),), (CheckpointRef(1, 5), CheckpointRef(1, 10))), where
        outcomes.add(len(live))
        for ref in live:
            require_bits(store, ref, OLD if ref.step == 5 else NEW, where)
        assert open_attempt(store) == 2
        save(store, 2, 11, rows_of(NEW, 2), OBJECT_BYTES)
        require_only_whole_checkpoints(store, where)
        for ref in (*live, CheckpointRef(2, 11)):
            require_bits(store, ref, OLD if ref.step == 5 else NEW, where)
        num_lives += 1
    assert outcomes == {1, 2} and num_lives > 10


def test_restore_killed_at_any_operation_leaves_nothing_and_the_next_one_reads_all(saved: Open, kind: str) -> None:
    """Case 1, 15."""
    store = saved("read")
    before = {info.key: store.read(info.key) for info in store.list()}
    ref = CheckpointRef(1, 5)
    num_lives = 0
    for where, _ in every_death(lambda _: store, lambda dying: held_by(dying, ref), STRIDES[kind]):
        num_lives += 1
        if num_lives % 8 == 1:
            require_bits(store, ref, OLD, where)
    assert num_lives > 2
    assert {info.key: store.read(info.key) for info in store.list()} == before


def test_opening_killed_at_any_operation_leaves_an_attempt_or_none(saved: Open) -> None:
    """Case 1, 14: whatever was opened last is where the chain ends, and it starts from the checkpoint."""
    outcomes = set()
    for where, store in every_death(saved, open_attempt):
        numbers = [attempt.number for attempt in Lineage(store).attempts()]
        outcomes.add(len(numbers))
        assert numbers == list(range(1, len(numbers) + 1)), where
        assert open_attempt(store) == len(numbers) + 1
        assert Lineage(store).newest_attempt().parent == CheckpointRef(1, 5)
        require_bits(store, CheckpointRef(1, 5), OLD, where)
    assert outcomes == {1, 2}
