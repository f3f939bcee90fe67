"""The collector on real stores: graces, order of deletions, kills, and what changes meanwhile."""

from __future__ import annotations

import os
import time

import pytest
from support.checkpoints import a_draft, open_attempt, restores, save, write_parts
from support.ministack import foreign_client

from phalanx.checkpoint.collection import Collector, OutlookChanged
from phalanx.checkpoint.facts import Decision, Policy
from phalanx.checkpoint.looking import Looker
from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore, fail_after, fail_before, on
from phalanx.snapshot.commit import commit

GRACE_S = 100.0
ALL = Policy()


class Died(Exception):
    """The process ended here."""


class Clock:
    """A clock that a test turns."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def looker(store, policy=ALL, clock=time.monotonic, **known):
    """Looks at storage alone; known: what a service would know beside it."""
    found = Looker(store, clock=clock)
    known = {"pinned": {}} | {name: frozenset(each) if name != "pinned" else each for name, each in known.items()}
    return lambda: found.look(policy, **known), found.stamp, found.leases


def collector(store, clock, policy=ALL, grace_s=GRACE_S, **settings):
    look, stamp, leases = looker(store, policy, clock, **settings)
    return Collector(store, look, stamp, grace_s=grace_s, clock=clock, leases=leases)


def refs(*steps, attempt=1):
    return [CheckpointRef(attempt, step) for step in steps]


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    root = open_store("memory://") if request.param == "memory" else open_store(f"file://{tmp_path}")
    return root.within("projects/p/jobs/j")


def saved(store, *steps, world_size=2):
    """An attempt with a checkpoint at each step."""
    open_attempt(store)
    before = 0
    for ref in refs(*steps):
        save(store, ref, world_size, first_step=before + 1)
        before = ref.step


def record_steps(store):
    """The steps that the live records tell of, in order."""
    return sorted(step for windows, _ in Lineage(store).records.live() for step in windows.step.tolist())


def test_collect_removes_old_checkpoints_after_the_grace_and_keeps_their_records(store):
    saved(store, 2, 4, 6, 8)
    clock = Clock()
    worker = collector(store, clock, Policy(keep_latest=2))
    first = worker.collect()
    assert [(r.ref.step, r.removed, r.num_objects) for r in first.removals] == [(2, False, 5), (4, False, 5)]
    clock.now_s = GRACE_S - 1
    worker.collect()
    assert Lineage(store).checkpoints() == tuple(refs(2, 4, 6, 8))
    clock.now_s = GRACE_S
    assert all(removal.removed for removal in worker.collect().removals)
    assert Lineage(store).checkpoints() == tuple(refs(6, 8))
    assert [info.key for info in store.list("a00000001/s00000002")] == [keys.retired(CheckpointRef(1, 2))]
    assert record_steps(store) == list(range(1, 9))
    assert worker.collect().removals == ()
    assert all(restores(store, ref) for ref in refs(6, 8))


def test_explain_deletes_nothing_and_begins_no_grace(store):
    saved(store, 2, 4)
    before = [info.key for info in store.list()]
    clock = Clock()
    worker = collector(store, clock, Policy(keep_latest=1))
    report = worker.explain()
    assert [(r.ref.step, r.why, r.removed) for r in report.removals] == [
        (2, "older than the newest 1 (checkpoint.keep_latest_k)", False)
    ]
    assert [(d.ref.step, d.why) for d in report.kept] == [(4, "the newest live checkpoint")]
    clock.now_s = 10 * GRACE_S
    worker.collect()
    assert [info.key for info in store.list()] == before


def test_collect_begins_the_grace_anew_for_what_was_needed_in_between(store):
    saved(store, 2, 4)
    clock = Clock()
    pinned = {}
    worker = collector(store, clock, Policy(keep_latest=1), pinned=pinned)
    worker.collect()
    pinned[CheckpointRef(1, 2)] = "a look"
    clock.now_s = GRACE_S
    assert worker.collect().removals == ()
    pinned.clear()
    assert not worker.collect().removals[0].removed
    clock.now_s = 2 * GRACE_S
    assert worker.collect().removals[0].removed


def test_collect_leaves_a_save_under_way_alone_and_its_commit_succeeds(store):
    saved(store, 2)
    ref = CheckpointRef(1, 4)
    write_parts(store, ref, 2, ranks=[0])
    clock = Clock()
    worker = collector(store, clock, Policy(keep_latest=1), grace_s=0)
    assert worker.collect().removals == ()
    write_parts(store, ref, 2, ranks=[1])
    commit(Lineage(store), store, a_draft(ref, 2), 2, 5)
    assert [removal.ref.step for removal in worker.collect().removals] == [2]
    assert restores(store, ref)


def test_collect_removes_what_attempts_left_behind(store):
    saved(store, 2)
    write_parts(store, CheckpointRef(1, 4), 2)
    open_attempt(store)
    commit(Lineage(store), store, a_draft(CheckpointRef(1, 4), 2), 2, 5)
    write_parts(store, CheckpointRef(1, 6), 2, ranks=[1])
    write_parts(store, CheckpointRef(2, 4), 2)
    report = collector(store, Clock(), grace_s=0, aborted=[CheckpointRef(2, 4)]).collect()
    assert {(r.ref.attempt, r.ref.step): r.why for r in report.removals} == {
        (1, 4): "dead: attempt 2 went on from step 2",
        (1, 6): "left behind by attempt 1, which attempt 2 ended",
        (2, 4): "a save that was given up",
    }
    assert {keys.checkpoint_of(info.key) for info in store.list()} == {None, CheckpointRef(1, 2)}


def test_collect_never_touches_what_is_not_a_checkpoint(store):
    saved(store, 2, 4)
    others = ["events/00000001.json", "a00000001/notes.txt", "a00000009/s00000001/x", "b/x", "journal/x.txt"]
    for key in others[:4]:
        store.create(key, b"x")
    collector(store, Clock(), Policy(keep_latest=1), grace_s=0).collect()
    assert {info.key for info in store.list()} > set(others[:4])


def test_collect_stops_where_an_attempt_was_opened_since_it_looked(store):
    saved(store, 2, 4)
    look, stamp, _ = looker(store, Policy(keep_latest=1))
    outlook = look()
    worker = Collector(store, lambda: outlook, stamp, grace_s=0)
    open_attempt(store, avoid=refs(4))
    report = worker.collect()
    assert not report.is_complete and report.removals == ()
    with pytest.raises(OutlookChanged):
        worker.remove_now(Decision(CheckpointRef(1, 2), False, "asked"), outlook)
    assert restores(store, CheckpointRef(1, 2))


def test_collect_keeps_everything_where_an_attempt_cannot_be_read(store):
    saved(store, 2, 4)
    store.delete(keys.attempt(1))
    store.create(keys.attempt(1), b"{}")
    with pytest.raises(Exception, match="attempts/00000001"):
        collector(store, Clock(), Policy(keep_latest=1), grace_s=0).collect()
    assert len([info for info in store.list() if keys.manifest_ref(info.key)]) == 2


def test_collect_treats_a_manifest_that_cannot_be_read_as_damage(store):
    saved(store, 2, 4, 6)
    key = keys.manifest(CheckpointRef(1, 6))
    data = store.read(key)
    store.delete(key)
    store.create(key, data[:-2] + b"!!")
    report = collector(store, Clock(), Policy(keep_latest=1), grace_s=0).collect()
    assert [decision.ref.step for decision in report.kept] == [4, 6]
    assert restores(store, CheckpointRef(1, 4))


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_collect_killed_at_any_change_leaves_only_whole_checkpoints_and_the_next_pass_finds_the_rest(tmp_path, late):
    died = fail_after if late else fail_before
    for number in range(40):
        inner = open_store(f"file://{tmp_path / str(number)}").within("projects/p/jobs/j")
        saved(inner, 2, 4, 6)
        write_parts(inner, CheckpointRef(1, 3), 2, ranks=[1])
        operation = "create" if number == 0 else "delete"
        store = FaultyStore(inner, [died(on(operation, nth=max(0, number - 1)), Died())])
        try:
            collector(store, Clock(), Policy(keep_latest=1), grace_s=0).collect()
        except Died:
            is_killed = True
        else:
            is_killed = False
        found = Lineage(inner).checkpoints()
        assert found[-1] == CheckpointRef(1, 6) and all(restores(inner, ref) for ref in found)
        assert record_steps(inner) == list(range(1, 7))
        assert open_attempt(inner).parent == CheckpointRef(1, 6)
        collector(inner, Clock(), Policy(keep_latest=1), grace_s=0).collect()
        left = {keys.checkpoint_of(info.key) for info in inner.list() if not keys.retired_ref(info.key)}
        assert left == {None, CheckpointRef(1, 6)}
        assert record_steps(inner) == list(range(1, 7))
        if not is_killed:
            return
    raise AssertionError("no pass went through")


def begin_upload(url, key):
    """An upload in parts that is begun by another client and never finished."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = foreign_client(os.environ["AWS_ENDPOINT_URL"])
    upload_id = client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{key}")["UploadId"]
    client.upload_part(Bucket=bucket, Key=f"{prefix}/{key}", UploadId=upload_id, PartNumber=1, Body=b"x" * 100)


def test_collect_drops_uploads_that_nobody_will_finish_after_the_grace(s3_prefix):
    store = open_store(s3_prefix).within("projects/p/jobs/j")
    saved(store, 2)
    open_attempt(store)
    dead, done, going, foreign = (
        keys.tensors(ref, keys.number(9), 0)
        for ref in (CheckpointRef(1, 4), CheckpointRef(1, 2), CheckpointRef(2, 4), CheckpointRef(9, 1))
    )
    for key in (dead, done, going, foreign):
        begin_upload(store.url, key)
    clock = Clock()
    worker = collector(store, clock)
    assert [removal.removed for removal in worker.collect().removals] == [False, False]
    clock.now_s = GRACE_S
    report = worker.collect()
    assert {removal.why.rpartition(" ")[2] for removal in report.removals if removal.removed} == {dead, done}
    assert {upload.key for upload in store.uploads()} == {going, foreign}
    assert restores(store, CheckpointRef(1, 2))
