"""The book of jobs: storage first, and two writers never act twice. Attempts opened once, by however many."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from train_values import DIGEST, PREPARED

from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest
from phalanx.lineage.documents import encode_document
from phalanx.lineage.events import Assignment, EventLog, EventType, JobState
from phalanx.lineage.registry import JobName, RegisteredJob, Registry
from phalanx.objects import open_store
from phalanx.rpc import FailedPrecondition, NotFound, OutOfRange
from phalanx.train.attempts import open_attempt
from phalanx.train.book import Book, Draft
from phalanx.train.decide import Record
from phalanx.train.states import Job, Preparation, Start
from phalanx.train.store import JobStore
from phalanx.train.term import LOOK_S, Term

NAME = JobName("default", "tiny")
SPEC = {
    "job": {"name": "tiny", "storage": ""},
    "model": {"args": {"vocab_size": 256, "dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 64}},
    "data": {"train": "file:///data/train"},
    "training": {"steps": 20, "global_batch_size": 8, "seq_len": 32},
    "optimizer": {"lr": 1e-3},
    "parallel": {"local_batch_size": 1},
}


def registered(folder: Path) -> RegisteredJob:
    url = f"file://{folder / 'jobs'}"
    spec = {**SPEC, "job": {"name": "tiny", "storage": url}}
    return RegisteredJob("default", "tiny", url, spec, "r", "ann")


def make_book(folder: Path, name: str = "a", kept_events: int = 100) -> Book:
    root = open_store(f"file://{folder / 'root'}")
    book = Book(root, JobStore(f"sqlite:///{folder / name}.sqlite", root.url), lambda *_: None, kept_events=kept_events)
    book.load()
    return book


def asked(job: Job) -> Draft:
    return Draft(Record(EventType.INCIDENT, data={"action": "notify", "first_step": 0, "last_step": 0}))


def test_job_registered_has_its_first_event_in_storage(tmp_path: Path) -> None:
    job = make_book(tmp_path).register(registered(tmp_path))
    assert (job.state, job.revision) == (JobState.QUEUED, 1)
    assert EventLog(job.registered.store()).newest() == 1


def test_job_whose_registration_was_cut_short_gets_its_first_event_at_the_next_start(tmp_path: Path) -> None:
    Registry(open_store(f"file://{tmp_path / 'root'}")).create_job(registered(tmp_path))
    assert make_book(tmp_path).job(NAME).revision == 1


def test_two_processes_that_write_at_once_lose_nothing_and_write_nothing_twice(tmp_path: Path) -> None:
    books = [make_book(tmp_path, "a"), make_book(tmp_path, "b")]
    books[0].register(registered(tmp_path))
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda index: books[index % 2].change(NAME, asked), range(40)))
    assert books[0].refresh(NAME) == books[1].refresh(NAME)
    assert books[0].job(NAME).revision == 41
    assert [event.number for event in books[1].events(NAME, 0)] == list(range(1, 42))


def test_decision_that_lost_is_taken_anew_on_what_won(tmp_path: Path) -> None:
    first, second = make_book(tmp_path, "a"), make_book(tmp_path, "b")
    first.register(registered(tmp_path))
    second.job(NAME)
    first.change(NAME, asked)
    seen = []

    def once(job: Job) -> Draft | None:
        seen.append(job.revision)
        return asked(job) if job.revision == 1 else None

    assert second.change(NAME, once).revision == 2
    assert seen == [1, 2]


def test_event_whose_row_was_lost_is_read_from_storage(tmp_path: Path) -> None:
    book = make_book(tmp_path)
    book.register(registered(tmp_path))
    add = JobStore.add_event
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobStore, "add_event", lambda *_: (_ for _ in ()).throw(OutsideError("the disk is full")))
        with pytest.raises(OutsideError):
            book.change(NAME, asked)
    assert JobStore.add_event is add
    assert book.change(NAME, asked).revision == 3
    assert [event.number for event in book.events(NAME, 0)] == [1, 2, 3]


def test_database_that_contradicts_storage_is_read_anew(tmp_path: Path) -> None:
    book = make_book(tmp_path)
    job = book.register(registered(tmp_path))
    event = next(book.events(NAME, 0))
    store = JobStore(f"sqlite:///{tmp_path / 'a'}.sqlite", open_store(f"file://{tmp_path / 'root'}").url)
    from dataclasses import replace

    store.add_event(NAME, replace(event, number=2, type=EventType.STOP_REQUESTED, writer="nobody"))
    assert make_book(tmp_path).job(NAME) == job


def unreachable(folder: Path) -> RegisteredJob:
    """A job that was registered while its storage could be written, and is not since."""
    url = "file:///proc/x"
    spec = {**SPEC, "job": {"name": "tiny", "storage": url}}
    return RegisteredJob("default", "tiny", url, spec, "r", "ann")


def test_job_that_cannot_be_reached_is_one_line_that_says_what_helps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    Registry(open_store(f"file://{root}")).create_job(unreachable(tmp_path))
    book = make_book(tmp_path)
    (record,) = [each for each in caplog.records if each.name == "phalanx.train.book"]
    line = record.getMessage()
    assert record.exc_info is None and "\n" not in line
    assert line.startswith(f"{NAME}: expected a job that can be reached (/proc/x/")
    assert line.endswith(f"if it never ran, free its name: remove file://{root}/registry/jobs/default/tiny.json")
    assert book.left_out() == {NAME: line} and book.jobs() == ()
    for ask in (book.job, book.find, book.refresh):
        with pytest.raises(FailedPrecondition) as caught:
            ask(NAME)
        assert str(caught.value) == line


def test_name_that_was_freed_is_another_jobs_before_and_after_a_start(tmp_path: Path) -> None:
    Registry(open_store(f"file://{tmp_path / 'root'}")).create_job(unreachable(tmp_path))
    book = make_book(tmp_path)
    (tmp_path / "root/registry/jobs/default/tiny.json").unlink()
    assert book.left_out() == {} and book.find(NAME) is None
    job = book.register(registered(tmp_path))
    assert (job.state, job.registered) == (JobState.QUEUED, registered(tmp_path))
    assert book.left_out() == {} and make_book(tmp_path).jobs() == (job,)


def test_job_that_can_be_reached_again_goes_on_once_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_bytes(b"in the way")
    Registry(open_store(f"file://{tmp_path / 'root'}")).create_job(registered(tmp_path))
    book = make_book(tmp_path)
    assert list(book.left_out()) == [NAME]
    (tmp_path / "jobs").unlink()
    assert book.job(NAME).state is JobState.QUEUED and book.left_out() == {}
    assert [job.name for job in book.jobs()] == [NAME]


def test_job_that_is_damaged_does_not_hold_up_the_others(tmp_path: Path) -> None:
    root = open_store(f"file://{tmp_path / 'root'}")
    root.create("registry/jobs/default/bad.json", b"{}")
    Registry(root).create_job(registered(tmp_path))
    book = make_book(tmp_path)
    assert [job.name for job in book.jobs()] == [NAME]
    with pytest.raises(NotFound):
        book.job(JobName("default", "none"))


@pytest.mark.parametrize(("after", "is_kept"), [(0, False), (1, False), (2, True), (5, True), (6, False)])
def test_revision_is_kept_within_the_bound(tmp_path: Path, after: int, is_kept: bool) -> None:
    book = make_book(tmp_path, kept_events=3)
    book.register(registered(tmp_path))
    for _ in range(4):
        book.change(NAME, asked)
    if is_kept:
        book.check_revision(NAME, after)
    else:
        with pytest.raises(OutOfRange, match="from 2, the oldest"):
            book.check_revision(NAME, after)


def test_registered_job_encodes_to_the_same_bytes_in_every_database(tmp_path: Path) -> None:
    job = make_book(tmp_path).register(registered(tmp_path)).registered
    assert encode_document(job) == encode_document(make_book(tmp_path, "b").job(NAME).registered)


# Attempts.


PREPARATION = Preparation(**{**PREPARED, "warnings": ()})


def start(request_id: str = "w1", attempt: int = 1, avoid_from: int = 0, *skips: tuple[int, int]) -> Start:
    return Start(attempt, request_id, (Assignment("n1", (0, 1)),), {"n1": "a"}, avoid_from, skips)


def commit(lineage: Lineage, attempt: int, step: int) -> None:
    manifest = Manifest(attempt, step, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(step, 8 * step), {}, (), ())
    lineage.commit(manifest)


def test_attempt_is_opened_once_by_however_many(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: open_attempt(store, start(), PREPARATION, 8), range(8)))
    assert {each.number for each in opened} == {1}
    assert open_attempt(store, start("w2", 2), PREPARATION, 8).number == 2
    assert [attempt.placement["nodes"] for attempt in Lineage(store).attempts()] == [{"n1": [0, 1]}] * 2


def test_attempt_avoids_checkpoints_that_affected_steps_went_into(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    open_attempt(store, start(), PREPARATION, 8)
    for step in (5, 8, 10):
        commit(Lineage(store), 1, step)
    assert open_attempt(store, start("w2", 2, 8), PREPARATION, 8).parent == CheckpointRef(1, 5)


def test_left_out_windows_are_journaled_once_in_each_attempt_that_lacks_them(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    lineage = Lineage(store)
    open_attempt(store, start(), PREPARATION, 8)
    commit(lineage, 1, 5)
    for _ in range(2):
        open_attempt(store, start("w2", 2, 8, (8, 9)), PREPARATION, 8)
    assert [(entry.position, entry.payload) for entry in lineage.journal(2)] == [(56, {"num_windows": 16})]
    open_attempt(store, start("w3", 3, 0, (8, 9)), PREPARATION, 8)
    assert len(lineage.journal(3)) == 1, "attempt 2 left no checkpoint, so its journal was not inherited"
    commit(lineage, 3, 6)
    open_attempt(store, start("w4", 4, 0, (8, 9)), PREPARATION, 8)
    assert len(lineage.journal(4)) == 1, "it is inherited now"


def test_term_that_is_newer_ends_the_older(tmp_path: Path) -> None:
    root, now_s = open_store(f"file://{tmp_path}"), [0.0]
    first = Term.claim(root)
    first = Term(root, first.number, lambda: now_s[0])
    second = Term.claim(root)
    assert (first.number, second.number) == (1, 2)
    assert not first.is_over(), "it looks again after a while"
    now_s[0] = LOOK_S
    assert first.is_over() and not second.is_over()


def test_terms_claimed_at_once_have_different_numbers(tmp_path: Path) -> None:
    root = open_store(f"file://{tmp_path}")
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: Term.claim(root).number, range(16)))
    assert sorted(numbers) == list(range(1, 17))
