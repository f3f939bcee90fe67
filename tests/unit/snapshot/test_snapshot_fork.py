"""The copy of a checkpoint under another job: whole, verified, and the same however often it is killed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.core.box import Box, HeldTensor
from phalanx.core.digest import sha256
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, ForkPoint, Lineage, LoaderState, Manifest, keys
from phalanx.lineage.encoding import decode, encode
from phalanx.lineage.lease_book import LeaseBook
from phalanx.objects import ObjectStore, open_store
from phalanx.objects.faults import Fault, FaultyStore, fail_after, fail_before, number_is, on
from phalanx.snapshot import DamagedCheckpoint, commit, load
from phalanx.snapshot.fork import import_checkpoint
from phalanx.snapshot.verify import verify
from phalanx.snapshot.writer import Writer

OLD, NEW, CODE, PLACEMENT = (sha256(name) for name in (b"old", b"new", b"code", b"placement"))
WORLD_SIZE, DEADLINE_S = 2, 20.0
ORIGIN = ForkPoint("default", "first", 2, 6, 48)


class Killed(BaseException):
    """The process died."""


@pytest.fixture
def source(tmp_path: Path) -> ObjectStore:
    """A job whose attempt 1 committed step 4, and attempt 2 step 6, each by two ranks."""
    store = open_store((tmp_path / "first").as_uri())
    lineage = Lineage(store)
    for attempt, step in ((1, 4), (2, 6)):
        lineage.open_attempt(code_digest=CODE, identity_digest=OLD, placement={})
        for rank in range(WORLD_SIZE):
            rows = HeldTensor(
                "model.w", (4, 3), Box((2 * rank, 0), (2, 3)), torch.full((2, 3), float(10 * step + rank))
            )
            Writer(store, rank, WORLD_SIZE, deadline_s=DEADLINE_S).save(attempt, step, [rows]).wait(DEADLINE_S)
        loader = LoaderState(step, step * 8)
        head = {"identity_digest": OLD, "placement_digest": PLACEMENT, "code_digest": CODE, "journal_digest": OLD}
        draft = Manifest(attempt, step, WORLD_SIZE, **head, loader=loader, schedule={"n": step}, records=(), parts=())
        commit(lineage, store, draft, WORLD_SIZE, DEADLINE_S)
    return store


def target_at(tmp_path: Path, name: str = "second") -> ObjectStore:
    store = open_store((tmp_path / name).as_uri())
    Lineage(store).create_job(request_id="r", spec={}, identity={}, identity_digest=NEW, origin=ORIGIN)
    return store


def fork(source: ObjectStore, target: ObjectStore, origin: ForkPoint = ORIGIN) -> None:
    import_checkpoint(source, target, origin, code_digest=CODE, identity_digest=NEW)


def contents(store: ObjectStore) -> dict[str, bytes]:
    return {info.key: store.read(info.key) for info in store.list()}


def test_copy_holds_the_same_tensors_under_the_new_identity(source: ObjectStore, tmp_path: Path) -> None:
    target = target_at(tmp_path)
    fork(source, target)
    lineage = Lineage(target)
    (ref,) = lineage.checkpoints()
    manifest = lineage.manifest(ref)
    assert ref == CheckpointRef(1, 6) and (manifest.identity_digest, manifest.loader) == (NEW, LoaderState(6, 48))
    assert manifest.schedule == {"n": 6} and manifest.records == () and manifest.code_digest == CODE
    np.testing.assert_array_equal(load(target.url, 6)["model.w"], load(source.url, 6)["model.w"])
    (attempt,) = lineage.attempts()
    assert attempt.placement["import"]["uid"] == "first" and attempt.parent is None
    child = lineage.open_attempt(code_digest=CODE, identity_digest=NEW, placement={})
    assert child.number == 2 and child.parent == ref


def test_copy_has_a_lease_on_its_origin_and_is_a_regular_checkpoint(source: ObjectStore, tmp_path: Path) -> None:
    """Case 4: retention spares what is being copied, whoever copies it where."""
    key = keys.manifest(CheckpointRef(2, 6))
    data = source.read(key)
    source.delete(key)
    source.create(key, encode(replace(decode(Manifest, key, data), speculative=True)))
    target, seen = target_at(tmp_path), []
    look = Fault(on("commit", "objects/"), before=lambda _: seen.append(LeaseBook(source).readers()))
    fork(source, FaultyStore(target, [look]))
    assert seen and all(CheckpointRef(2, 6) in readers for readers in seen) and LeaseBook(source).readers() == {}
    assert not Lineage(target).manifest(CheckpointRef(1, 6)).speculative


def test_copy_passes_verification(source: ObjectStore, tmp_path: Path) -> None:
    target = target_at(tmp_path)
    fork(source, target)
    assert not list(verify(target, Lineage(target).manifest(CheckpointRef(1, 6))))


def test_copy_again_changes_nothing_and_needs_no_origin(source: ObjectStore, tmp_path: Path) -> None:
    target = target_at(tmp_path)
    fork(source, target)
    before = contents(target)
    fork(open_store((tmp_path / "gone").as_uri()), target)
    assert contents(target) == before


@pytest.mark.parametrize("make", [fail_before, fail_after])
def test_copy_killed_anywhere_and_run_again_is_the_same(
    source: ObjectStore, tmp_path: Path, make: Callable[..., object]
) -> None:
    whole = target_at(tmp_path, "whole")
    fork(source, whole)
    for number in range(100):
        target = target_at(tmp_path, f"killed-{number}")
        watched = FaultyStore(target, [make(number_is(number), Killed())])  # type: ignore[arg-type, list-item]
        try:
            fork(source, watched)
        except Killed:
            if not Lineage(target).checkpoints():
                with pytest.raises(PhalanxError, match="at least the copy of attempt 2 step 6"):
                    Lineage(target).open_attempt(code_digest=CODE, identity_digest=NEW, placement={})
            fork(source, target)
        assert contents(target) == contents(whole)
        if len(watched.calls) <= number:
            break
    assert 8 < number < 99


@pytest.mark.parametrize("what", ["objects", "parts"])
def test_damaged_byte_of_the_origin_is_named_and_makes_no_checkpoint(
    source: ObjectStore, tmp_path: Path, what: str
) -> None:
    key = next(info.key for info in source.list(f"{keys.checkpoint(CheckpointRef(2, 6))}{what}/"))
    data = bytearray(source.read(key))
    data[-1] ^= 1
    source.delete(key)
    source.create(key, bytes(data))
    target = target_at(tmp_path)
    with pytest.raises(DamagedCheckpoint, match=key):
        fork(source, target)
    assert Lineage(target).checkpoints() == () and not list(target.list(keys.objects(CheckpointRef(1, 6))))[1:]


def test_job_that_began_in_another_way_is_refused(source: ObjectStore, tmp_path: Path) -> None:
    target = open_store((tmp_path / "own").as_uri())
    Lineage(target).open_attempt(code_digest=CODE, identity_digest=NEW, placement={})
    with pytest.raises(PhalanxError, match="whose first attempt is the import"):
        fork(source, target)


def test_copy_that_retention_removed_is_not_made_again(source: ObjectStore, tmp_path: Path) -> None:
    target = target_at(tmp_path)
    fork(source, target)
    lineage = Lineage(target)
    lineage.open_attempt(code_digest=CODE, identity_digest=NEW, placement={})
    lineage.retire(CheckpointRef(1, 6))
    for info in list(target.list("a00000001/s00000006/")):
        if not info.key.endswith("retired.json"):
            target.delete(info.key)
    before = contents(target)
    fork(source, target)
    assert contents(target) == before
