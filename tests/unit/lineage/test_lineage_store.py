"""The lineage in a store: attempts, journal, job and manifests, what is refused, and twenty openers at once."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from lineage_kit import (
    CODE,
    IDENTITY,
    PLACEMENT,
    LostReplyStore,
    a_manifest,
    memory_store,
    open_next,
    step_rows,
    window_rows,
)

from phalanx.core.digest import sha256
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, DamagedObject, Lineage, ObjectRef, journal_digest, keys, live_chain
from phalanx.objects import open_store


@pytest.fixture
def lineage():
    return Lineage(memory_store())


def commit(lineage: Lineage, attempt: int, *steps: int) -> None:
    for step in steps:
        lineage.commit(a_manifest(attempt, step))


def test_first_attempt_has_no_parent_and_holds_what_it_was_given(lineage):
    attempt = open_next(lineage)
    assert (attempt.number, attempt.parent, attempt.journal, attempt.start_step) == (1, None, (), 0)
    assert (attempt.code_digest, attempt.identity_digest, attempt.placement) == (CODE, IDENTITY, PLACEMENT)
    assert lineage.attempts() == (attempt,)
    assert lineage.newest_attempt() == attempt


def test_lineage_before_the_first_attempt_is_empty(lineage):
    assert lineage.attempts() == lineage.chain() == lineage.checkpoints() == ()
    assert lineage.newest_attempt() is None
    assert lineage.read_job() is None
    assert list(lineage.records.live()) == []


def test_next_attempt_starts_from_the_newest_live_checkpoint(lineage):
    open_next(lineage)
    commit(lineage, 1, 5, 10)
    assert open_next(lineage).parent == CheckpointRef(1, 10)


def test_next_attempt_avoids_the_damaged_checkpoint_as_in_the_designs_example(lineage):
    open_next(lineage)
    commit(lineage, 1, 5, 10)
    assert open_next(lineage, avoid=(CheckpointRef(1, 10),)).parent == CheckpointRef(1, 5)
    commit(lineage, 2, 10, 15)
    commit(lineage, 1, 15)
    assert lineage.checkpoints() == (CheckpointRef(1, 5), CheckpointRef(2, 10), CheckpointRef(2, 15))
    assert open_next(lineage).parent == CheckpointRef(2, 15)


def test_next_attempt_that_must_avoid_all_starts_from_the_beginning(lineage):
    open_next(lineage)
    commit(lineage, 1, 5)
    assert open_next(lineage, avoid=(CheckpointRef(1, 5),)).parent is None
    assert lineage.checkpoints() == ()


def test_next_attempt_after_one_without_checkpoints_goes_back_to_its_parent_but_never_to_a_zombies(lineage):
    open_next(lineage)
    lineage.append_journal(1, "damage", 3, {})
    commit(lineage, 1, 5)
    open_next(lineage)
    lineage.append_journal(2, "damage", 7, {})
    commit(lineage, 1, 10)
    lineage.append_journal(1, "damage", 9, {})
    third = open_next(lineage)
    assert (third.parent, third.journal) == (CheckpointRef(1, 5), ((1, 1),))
    assert [entry.position for entry in lineage.journal(3)] == [3]


def test_next_attempt_of_another_identity_than_its_parent_is_the_users_error(lineage):
    open_next(lineage)
    commit(lineage, 1, 5)
    with pytest.raises(PhalanxError, match="attempt 1 step 5"):
        lineage.open_attempt(code_digest=CODE, identity_digest=sha256(b"other"), placement=PLACEMENT)
    assert len(lineage.attempts()) == 1


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_twenty_openers_at_once_get_distinct_numbers_and_a_consistent_chain(scheme, tmp_path):
    store = memory_store() if scheme == "memory" else open_store(tmp_path.as_uri()).within("projects/p/jobs/j/")
    barrier = threading.Barrier(20)

    def opener(_: int) -> int:
        mine = Lineage(store)
        barrier.wait()
        attempt = open_next(mine)
        mine.append_journal(attempt.number, "damage", attempt.number, {})
        commit(mine, attempt.number, attempt.start_step + 1)
        return attempt.number

    with ThreadPoolExecutor(20) as pool:
        numbers = sorted(pool.map(opener, range(20)))
    lineage = Lineage(store)
    assert numbers == [attempt.number for attempt in lineage.attempts()] == list(range(1, 21))
    assert lineage.chain() == live_chain(lineage.attempts())
    steps = [ref.step for ref in lineage.checkpoints()]
    assert steps == list(range(1, len(steps) + 1))
    assert journal_digest(lineage.journal(20)[: sum(count for _, count in lineage.attempts()[-1].journal)]) == (
        lineage.attempts()[-1].journal_digest
    )


def test_journal_appended_by_twenty_writers_at_once_has_every_entry_once(lineage):
    open_next(lineage)
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda position: lineage.append_journal(1, "damage", position, {}), range(20)))
    entries = lineage.journal(1)
    assert [entry.number for entry in entries] == list(range(1, 21))
    assert sorted(entry.position for entry in entries) == list(range(20))


def test_journal_request_repeated_counts_once(lineage):
    open_next(lineage)
    first = lineage.append_journal(1, "damage", 3, {"windows": [3]}, request_id="r")
    lineage.append_journal(1, "damage", 4, {})
    assert lineage.append_journal(1, "damage", 3, {"windows": [3]}, request_id="r") == first
    assert len(lineage.journal(1)) == 2


def test_journal_whose_ancestors_entry_was_replaced_is_refused():
    store = memory_store()
    lineage = Lineage(store)
    open_next(lineage)
    lineage.append_journal(1, "damage", 3, {})
    commit(lineage, 1, 5)
    open_next(lineage)
    store.delete(keys.journal_entry(1, 1))
    with pytest.raises(DamagedObject, match=r"journal/a00000001/00000001.json is missing"):
        lineage.journal(2)
    lineage.append_journal(1, "damage", 4, {})
    with pytest.raises(DamagedObject, match="another journal of its ancestors"):
        lineage.journal(2)


def test_all_journal_entries_of_dead_attempts_come_and_their_damage_is_passed_over(caplog):
    store = memory_store()
    lineage = Lineage(store)
    open_next(lineage)
    commit(lineage, 1, 5)
    live = lineage.append_journal(1, "note", 1, {"of": 1})
    open_next(lineage)  # inherits entry 1 of attempt 1
    dead = [lineage.append_journal(2, "note", 1, {"of": 2, "n": n}) for n in (1, 2)]
    dead.append(lineage.append_journal(1, "note", 1, {"too": "late"}))  # attempt 2 was opened before it
    open_next(lineage)  # parent (1, 5) again, as attempt 2 committed nothing
    assert [entry.payload for entry in lineage.all_journal_entries()] == [
        {"of": 1},
        {"too": "late"},
        {"of": 2, "n": 1},
        {"of": 2, "n": 2},
    ]
    for entry in dead:
        spoil(store, keys.journal_entry(entry.attempt, entry.number))
    assert list(lineage.all_journal_entries()) == [live]
    assert "journal/a00000002/00000002.json" in caplog.text
    spoil(store, keys.journal_entry(live.attempt, live.number))
    with pytest.raises(DamagedObject, match=r"journal/a00000001/00000001\.json"):
        list(lineage.all_journal_entries())


def spoil(store, key: str) -> None:
    data = store.read(key)
    store.delete(key)
    store.create(key, data[:-2])


def test_every_write_whose_reply_was_lost_is_recognised_as_done():
    store = memory_store()
    lineage = Lineage(LostReplyStore(store))
    job = {"request_id": "r", "spec": {}, "identity": {"a": 1}, "identity_digest": IDENTITY}
    lineage.create_job(**job)
    open_next(lineage)
    lineage.append_journal(1, "damage", 3, {})
    ref = lineage.records.put(1, 0, 1, 5, window_rows([1], [0]), step_rows([1]))
    lineage.commit(a_manifest(1, 5, (ref,)))
    assert [attempt.number for attempt in lineage.attempts()] == [1]
    assert len(lineage.journal(1)) == 1
    assert [len(windows) for windows, _ in lineage.records.live()] == [1]


def test_commit_again_is_recognised_and_another_manifest_is_refused(lineage):
    open_next(lineage)
    commit(lineage, 1, 5, 5)
    with pytest.raises(DamagedObject, match="other content"):
        lineage.commit(a_manifest(1, 5, world_size=4))
    assert lineage.manifest(CheckpointRef(1, 5)) == a_manifest(1, 5)


def test_commit_that_cannot_be_live_by_construction_is_refused(lineage):
    with pytest.raises(DamagedObject, match=r"attempts/00000001.json is missing"):
        commit(lineage, 1, 5)
    open_next(lineage)
    commit(lineage, 1, 5)
    open_next(lineage)
    with pytest.raises(ValueError, match="not after the parent"):
        commit(lineage, 2, 5)


def test_commit_of_a_root_over_one_mebibyte_is_refused(lineage):
    open_next(lineage)
    refs = tuple(ObjectRef(keys.part(CheckpointRef(1, 5), rank), 10**6, CODE) for rank in range(9_000))
    with pytest.raises(ValueError, match="expected less than 1048576"):
        lineage.commit(a_manifest(1, 5, parts=refs))
    assert lineage.checkpoints() == ()


def test_object_that_is_another_ones_copy_is_refused():
    store = memory_store()
    lineage = Lineage(store)
    open_next(lineage)
    lineage.append_journal(1, "damage", 3, {})
    commit(lineage, 1, 5)
    store.create(keys.attempt(2), store.read(keys.attempt(1)))
    store.create(keys.journal_entry(1, 2), store.read(keys.journal_entry(1, 1)))
    store.create(keys.manifest(CheckpointRef(1, 10)), store.read(keys.manifest(CheckpointRef(1, 5))))
    with pytest.raises(DamagedObject, match="says that it is attempt 1"):
        lineage.attempts()
    with pytest.raises(DamagedObject, match="says that it is entry 1 of attempt 1"):
        lineage.journal(1)
    with pytest.raises(DamagedObject, match="says that it is attempt 1 step 5"):
        lineage.manifest(CheckpointRef(1, 10))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("attempts/notes.txt", "is foreign"),
        ("attempts/00000003.json", "a gap before it: the one numbered 2 is missing"),
    ],
)
def test_foreign_object_among_the_attempts_is_named(key, reason):
    store = memory_store()
    open_next(Lineage(store))
    store.create(key, b"{}")
    with pytest.raises(DamagedObject, match=f"object {key} .*{reason}"):
        open_next(Lineage(store))


def test_attempt_with_a_damaged_parent_manifest_says_what_to_avoid():
    store = memory_store()
    lineage = Lineage(store)
    open_next(lineage)
    commit(lineage, 1, 5, 10)
    key = keys.manifest(CheckpointRef(1, 10))
    data = store.read(key)
    store.delete(key)
    store.create(key, data.replace(b'"world_size":2', b'"world_size":3'))
    with pytest.raises(DamagedObject, match="is damaged") as caught:
        open_next(lineage)
    assert caught.value.checkpoint == CheckpointRef(1, 10)
    assert open_next(lineage, avoid=(caught.value.checkpoint,)).parent == CheckpointRef(1, 5)


def test_live_records_are_those_of_the_live_chain_alone(lineage):
    open_next(lineage)
    for attempt, step in ((1, 1), (1, 2), (2, 2)):
        if attempt == 2:
            open_next(lineage, avoid=(CheckpointRef(1, 2),))
        ref = lineage.records.put(attempt, 0, step, step, window_rows([step], [attempt * 10 + step]), step_rows([step]))
        lineage.commit(a_manifest(attempt, step, (ref,)))
    lineage.records.put(2, 1, 3, 4, None, None)
    assert [windows.position.tolist() for windows, _ in lineage.records.live()] == [[11], [22]]
    assert lineage.records.last_steps() == {1: 2, 2: 4}


def job(**identity: object) -> dict:
    identity = {"model": {"dim": 64, "heads": 4}, "training.seed": 0} | identity
    return {"spec": {"job": {"name": "j"}}, "identity": identity, "identity_digest": sha256(repr(identity).encode())}


def test_job_created_again_with_the_same_identity_continues_as_first_created(lineage):
    first = lineage.create_job(request_id="r1", **job())
    assert lineage.create_job(request_id="r2", **job()) == first == lineage.read_job()


def test_job_of_another_identity_is_refused_naming_every_key_that_differs(lineage):
    lineage.create_job(request_id="r1", **job())
    with pytest.raises(PhalanxError) as caught:
        lineage.create_job(request_id="r2", **job(model={"dim": 128, "heads": 4}, **{"data.train_digest": "sha256:1"}))
    message = str(caught.value)
    assert "data.train_digest = 'sha256:1' (was absent), model.dim = 128 (was 64)" in message
    assert "heads" not in message
    assert "give the job another [job] name" in message
    assert "\n" not in message
    assert lineage.read_job().request_id == "r1"


def test_job_with_another_dataset_alone_is_refused_naming_the_data(lineage):
    lineage.create_job(request_id="r1", **job())
    with pytest.raises(PhalanxError, match="the data"):
        lineage.create_job(request_id="r2", **(job() | {"identity_digest": sha256(b"other data")}))


def test_job_object_that_is_damaged_is_never_taken_for_a_new_job():
    store = memory_store()
    store.create(keys.JOB, b"{}")
    with pytest.raises(DamagedObject, match=r"job\.json"):
        Lineage(store).read_job()
    with pytest.raises(DamagedObject, match=r"job\.json"):
        Lineage(store).create_job(request_id="r", **job())


def test_manifest_names_what_a_reader_needs_and_is_frozen():
    manifest = a_manifest(1, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.step = 6
    assert manifest.ref == CheckpointRef(1, 5)
