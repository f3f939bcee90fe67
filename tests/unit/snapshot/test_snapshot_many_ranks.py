"""A checkpoint of so many parts that its root names lists of them: whole or absent, found by its directory, read as
small ones are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_job import draft, open_attempt, save, tilings, whole_of
from support.checkpoints import COLUMNS, ROWS, restores, values_of, write_parts
from support.dying import every_death

from phalanx.checkpoint.commits import require_same
from phalanx.checkpoint.pruning import prune
from phalanx.checkpoint.retention import Policy
from phalanx.core.box import Box, HeldTensor
from phalanx.core.digest import xxh3
from phalanx.lineage import CheckpointRef, DamagedObject, Lineage, Manifest, ObjectRef, keys
from phalanx.lineage.encoding import encode
from phalanx.lineage.lists import MOST_NAMED, REFS_A_LIST, decode_refs, encoded_lists
from phalanx.objects import ObjectStore, open_store
from phalanx.objects.faults import FaultyStore
from phalanx.snapshot import DamagedCheckpoint, commit
from phalanx.snapshot.commit import root_of
from phalanx.snapshot.coverage import coverage_fault, tiles
from phalanx.snapshot.load import Tensors
from phalanx.snapshot.lookup import Lookup, read_needed
from phalanx.snapshot.restore import restore
from phalanx.snapshot.tally import Tally
from phalanx.snapshot.verify import verify

RANKS = MOST_NAMED + 6
REF = CheckpointRef(1, 5)
SHAPE = (ROWS * RANKS, COLUMNS)


def saved(ranks: int = RANKS) -> tuple[ObjectStore, Manifest]:
    store = open_store("memory://")
    open_attempt(store)
    write_parts(store, REF, ranks)
    return store, commit(Lineage(store), store, draft(1, 5), ranks, 30)


@pytest.fixture
def job() -> tuple[ObjectStore, Manifest]:
    return saved()


def rows(first: int, count: int) -> HeldTensor:
    return HeldTensor("model.w", SHAPE, Box((first, 0), (count, COLUMNS)), torch.zeros(count, COLUMNS))


def test_root_of_many_parts_names_lists_and_of_few_parts_the_parts(job: tuple[ObjectStore, Manifest]) -> None:
    store, manifest = job
    assert manifest.parts == () and len(manifest.part_lists) == 1 and manifest.directory is not None
    assert [ref.key for ref in Lineage(store).part_refs(manifest)] == [keys.part(REF, rank) for rank in range(RANKS)]
    assert Lineage(store).manifest(REF) == manifest and verify(store, manifest) == () and restores(store, REF)
    require_same(replace(draft(1, 5), world_size=RANKS), manifest)
    _, few = saved(MOST_NAMED)
    assert len(few.parts) == MOST_NAMED and few.directory is None
    assert "part_lists" not in json.loads(encode(few))["content"]


def test_root_of_16384_parts_and_records_stays_small() -> None:
    refs = [ObjectRef(keys.part(REF, rank), 10**6, xxh3(b"")) for rank in range(16_384)]
    lists = list(encoded_lists(refs))
    assert len(lists) == 16_384 // REFS_A_LIST and max(map(len, lists)) < 1 << 20
    assert [ref for data in lists for ref in decode_refs("k", data)] == refs
    named = tuple(ObjectRef(keys.part_list(REF, xxh3(data)), len(data), xxh3(data)) for data in lists)
    assert len(encode(Manifest(*_fields(), part_lists=named, record_lists=named))) < 16_384


def _fields() -> Iterator[object]:
    head = draft(1, 5)
    return (getattr(head, name) for name in list(Manifest.__dataclass_fields__)[:11])


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), st.data())
def test_tiles_says_of_any_boxes_what_the_sweep_says(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = data.draw(tilings(shape))
    change = data.draw(st.sampled_from(["none", "twice", "missing", "moved"]))
    at = data.draw(st.integers(0, len(boxes) - 1))
    if change == "twice":
        boxes.append(boxes[at])
    elif change == "missing":
        del boxes[at]
    elif change == "moved":
        boxes[at] = Box((boxes[at].offset[0] + 1, *boxes[at].offset[1:]), boxes[at].shape)
    columns = [np.array([getattr(box, name) for box in boxes]).reshape(-1, len(shape)) for name in ("offset", "shape")]
    assert tiles(shape, *columns) == (coverage_fault(shape, boxes) is None)


@pytest.mark.parametrize("change", [b"", b"[]", b'{"refs":[1]}', b'{"format":"phalanx.refs/1","refs":[]} '])
def test_list_in_another_form_is_refused(change: bytes) -> None:
    with pytest.raises(DamagedObject, match=r"list|form"):
        decode_refs("k", change)


def test_restore_by_the_directory_reads_the_parts_it_needs(job: tuple[ObjectStore, Manifest]) -> None:
    store, manifest = job
    index = read_needed(store, manifest, {"model.w": [Box((ROWS * 3, 0), (ROWS + 1, COLUMNS))], "other": []})
    assert sorted(index.objects) == [keys.tensors(REF, keys.number(rank), 0) for rank in (3, 4)]
    assert index.tensors["model.w"].global_shape == SHAPE
    held = rows(ROWS * 3, ROWS + 1)
    report = restore(store, manifest, [held], all_names=["model.w"])
    assert (held.local.numpy() == values_of(REF)[0, 0]).all()
    parts = [store.info(keys.part(REF, rank)).num_bytes for rank in range(RANKS)]
    assert 0 < report.index_bytes < sum(parts)


@pytest.mark.parametrize("what", ["lists/", "directory/"])
def test_damage_of_a_list_or_of_the_directory_is_named(what: str, job: tuple[ObjectStore, Manifest]) -> None:
    """Case 7: both are refused by their digests, and the checkpoint is the one to avoid."""
    store, manifest = job
    for info in list(store.list(f"{keys.checkpoint(REF)}{what}")):
        data = bytearray(store.read(info.key))
        data[len(data) // 2] ^= 1
        store.delete(info.key)
        store.create(info.key, bytes(data))
    with pytest.raises(DamagedCheckpoint, match=what) as caught:
        restore(store, manifest, [rows(0, 4)])
    assert caught.value.checkpoint == REF
    assert any(what in damage.key for damage in verify(store, manifest))


def test_commit_killed_at_any_operation_leaves_it_whole_or_absent_and_garbage_goes() -> None:
    """Case 1: lists and directory included, whoever commits it afterwards."""

    def begun(name: str) -> ObjectStore:
        store = open_store(f"memory://{name}{np.random.default_rng().integers(1 << 60)}").within("projects/p/jobs/j")
        open_attempt(store)
        write_parts(store, REF, RANKS)
        return store

    outcomes = set()
    stride = 23  # most operations read a part
    for where, store in every_death(begun, lambda dying: commit(Lineage(dying), dying, draft(1, 5), RANKS, 30), stride):
        live = Lineage(store).checkpoints()
        outcomes.add(live)
        assert live in ((), (REF,)), where
        if not live:
            assert open_attempt(store) == 2
            prune(store, Policy(), dry_run=False, grace_s=0)
            assert not [info.key for info in store.list(keys.checkpoint(REF))], where
            continue
        assert restores(store, REF), where
        assert commit(Lineage(store), store, draft(1, 5), RANKS, 30).ref == REF
    assert () in outcomes


def test_retirement_keeps_the_names_of_many_records() -> None:
    """Records stay provable: their lists lie beside them, outside of the folder that goes."""
    store = open_store("memory://")
    lineage = Lineage(store)
    open_attempt(store)
    names = [lineage.records.put(1, rank, 1, 5, None, None) for rank in range(RANKS)]
    manifest = root_of(lineage, draft(1, 5), (), names, Tally())
    assert manifest.records == () and len(manifest.record_lists) == 1
    lineage.commit(manifest)
    lineage.retire(REF)
    for info in list(store.list(keys.checkpoint(REF))):
        if info.key != keys.retired(REF):
            store.delete(info.key)
    assert list(lineage.records.live_refs()) == names


def test_load_of_some_tensors_reads_the_parts_that_hold_them_once() -> None:
    """Of a checkpoint with a directory; what is not asked for is not read, and names are known without any part."""
    store = open_store("memory://")
    layout = [whole_of({f"t{rank:02d}": torch.full((3,), float(rank))}) for rank in range(RANKS)]
    manifest = save(store, open_attempt(store), 5, layout)
    watched = FaultyStore(store)
    tensors = Tensors(watched, manifest.ref, Lookup(watched, manifest))
    assert manifest.directory is not None and len(tensors) == RANKS and "t03" in tensors and "x" not in tensors
    assert _parts_read(watched) == []
    for _ in range(2):
        assert tensors["t03"].tolist() == [3.0] * 3
    tensors.find(tensors.named(["t0[1-3]"]))
    assert _parts_read(watched) == [keys.part(manifest.ref, rank) for rank in (3, 1, 2)]
    assert [values[0] for values in tensors.values()] == list(range(RANKS))
    assert len(_parts_read(watched)) == RANKS
    with pytest.raises(KeyError):
        tensors["x"]


def _parts_read(store: FaultyStore) -> list[str]:
    return [call.key for call in store.calls if call.operation == "read" and "/parts/" in call.key]
