"""Commits at once, replies that are lost, refusals in between, and clocks that jump: one checkpoint, whole."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from saved_job import draft, file_store, open_attempt, rows_of, save
from support.faulty_proxy import Spoiler, proxying
from support.ministack import Endpoint
from test_snapshot_crash import NEW, OBJECT_BYTES, OLD, require_bits, save_as_two_ranks

from phalanx.checkpoint.pruning import prune
from phalanx.checkpoint.retention import Policy
from phalanx.lineage import CheckpointRef, DamagedObject, Lineage, Manifest, keys
from phalanx.objects import ObjectStore, StorageSettings, StoreError, open_store
from phalanx.objects.faults import FaultyStore, fail_after, number_is
from phalanx.objects.memory import MemoryStore
from phalanx.snapshot.commit import commit
from phalanx.snapshot.writer import Writer

pytestmark = pytest.mark.timeout(240)
COMMITTERS = 20
ROOT = Path(__file__).parents[3]


@pytest.fixture(params=["memory", "file", "s3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ObjectStore]:
    """Opens the store as a process of its own would."""
    if request.param == "memory":
        memory = MemoryStore()
        return lambda: memory
    url = tmp_path.as_uri() if request.param == "file" else str(request.getfixturevalue("s3_prefix"))
    return lambda: open_store(url)


def written(store: ObjectStore) -> None:
    """A job with one checkpoint, and step 10 written by two ranks but not committed."""
    save(store, open_attempt(store), 5, rows_of(OLD, 2), OBJECT_BYTES)
    for rank, held in enumerate(rows_of(NEW, 2)):
        Writer(store, rank, 2, object_bytes=OBJECT_BYTES).save(1, 10, held).wait(60)


@pytest.mark.parametrize("num_drafts", [1, COMMITTERS])
def test_twenty_committers_at_once_make_one_manifest(opened: Callable[[], ObjectStore], num_drafts: int) -> None:
    """Case 1, 9: of the same draft all agree; of as many drafts as committers one counts, and the others are told."""
    written(opened())
    start = threading.Barrier(COMMITTERS, timeout=60)  # one that cannot begin lets the others go

    def act(number: int) -> Manifest | None:
        store = opened()
        mine = dataclasses.replace(draft(1, 10), schedule={"lr": float(number % num_drafts)})
        start.wait()
        try:
            return commit(Lineage(store), store, mine, 2, 60)
        except DamagedObject:
            return None

    with ThreadPoolExecutor(COMMITTERS) as pool:
        made = [manifest for manifest in pool.map(act, range(COMMITTERS)) if manifest is not None]
    store = opened()
    stored = Lineage(store).manifest(CheckpointRef(1, 10))
    assert made == [stored] * (COMMITTERS if num_drafts == 1 else 1)
    assert Lineage(store).checkpoints() == (CheckpointRef(1, 5), CheckpointRef(1, 10))
    require_bits(store, CheckpointRef(1, 10), NEW, "20 committers")


def test_save_whose_reply_is_lost_at_any_operation_is_the_same_one_when_asked_again() -> None:
    """Case 10: the store did it, the caller never heard; objects, parts, records and manifest are recognised as own."""
    for at in itertools.count():
        store = MemoryStore()
        save(store, open_attempt(store), 5, rows_of(OLD, 2), OBJECT_BYTES)
        lossy = FaultyStore(store, [fail_after(number_is(at), StoreError("reply lost"))], streams=True)
        try:
            save_as_two_ranks(lossy)
        except StoreError:
            save_as_two_ranks(store)
        assert Lineage(store).checkpoints() == (CheckpointRef(1, 5), CheckpointRef(1, 10)), at
        require_bits(store, CheckpointRef(1, 10), NEW, str(at))
        if len(lossy.calls) <= at:
            return


@pytest.mark.parametrize(
    "spoiler",
    [Spoiler(lose_reply=True), Spoiler(refuse=409, code="ConditionalRequestConflict"), Spoiler(refuse=503)],
    ids=["lost reply", "409", "503"],
)
def test_save_to_s3_goes_through_a_spoiled_first_answer_to_every_write(
    ministack: Endpoint, s3_bucket: str, spoiler: Spoiler
) -> None:
    """Case 10: 412 from one's own write is recognised, 409 is tried again, no write is taken for somebody else's."""
    mark, spoiled, lock = uuid.uuid4().hex, set[str](), threading.Lock()

    def first_write(method: str, path: str, number: int) -> Spoiler | None:
        with lock:
            what = f"{method} {path.partition('uploadId')[0]}"
            if method not in ("PUT", "POST") or what in spoiled:
                return None
            spoiled.add(what)
            return spoiler

    with proxying(ministack) as proxy:
        store = open_store(f"{s3_bucket}/{mark}", StorageSettings(endpoint=proxy.endpoint), 30)
        save(store, open_attempt(store), 5, rows_of(OLD, 2), OBJECT_BYTES)
        proxy.restart(mark)
        proxy.choose = first_write
        save_as_two_ranks(store)
    assert len(spoiled) > 5
    plain = open_store(f"{s3_bucket}/{mark}", StorageSettings(endpoint=ministack))
    require_bits(plain, CheckpointRef(1, 10), NEW, str(spoiler))


def test_wall_clock_that_jumps_at_every_look_changes_no_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 14: a day back and two days forth in turn, while a zombie commits behind the attempt that superseded it."""
    real, looks = time.time, itertools.count()

    def jumping() -> float:
        return real() + (-86_400 if next(looks) % 2 else 172_800)

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    store = file_store(tmp_path)
    for step in (2, 4, 6):
        save(store, open_attempt(store), step, rows_of(OLD, 2), OBJECT_BYTES)
    save(store, 1, 9, rows_of(NEW, 2), OBJECT_BYTES)
    live = (CheckpointRef(1, 2), CheckpointRef(2, 4), CheckpointRef(3, 6))
    assert Lineage(store).checkpoints() == live
    report = prune(store, Policy(keep_latest=2), dry_run=False, grace_s=0)
    assert {removal.ref for removal in report.removals if removal.removed} == {CheckpointRef(1, 9)}
    assert Lineage(store).checkpoints() == live
    assert [info.key for info in store.list(keys.checkpoint(CheckpointRef(1, 9)))] == []


def test_no_decision_about_checkpoints_looks_at_a_wall_clock() -> None:
    """Clock steps: only what people read (the catalog's times) and credentials may."""
    rooms = ["libs/phalanx/lineage", "libs/phalanx/snapshot", "libs/phalanx/objects", "services/phalanx/checkpoint"]
    clock = re.compile(r"time\.time\(|time_ns\(\)|datetime\.now|utcnow\(|\.st_mtime\b")
    found = {
        path.relative_to(ROOT).as_posix()
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        if clock.search(path.read_text())
    }
    assert found <= {
        "libs/phalanx/objects/s3_client.py",
        "services/phalanx/checkpoint/catalog.py",
        "services/phalanx/checkpoint/commits.py",
    }
