"""Reading plans: the same as storage alone gives, for the newest attempt only, and cheap."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.datasets import make_job, open_attempt, write_dataset, write_split

from phalanx.core.errors import PhalanxError
from phalanx.data.jobs import FoundJob, Journals
from phalanx.data.plans import HorizonPolicy, JournalView, plan_for, require_newest
from phalanx.data.reading import Reading
from phalanx.lineage import JournalEntry, Lineage, journal_digest
from phalanx.lineage.plan import HORIZON_STEPS, reading_plan, zero_weight_spans
from phalanx.lineage.registry import JobName
from phalanx.objects import open_store
from phalanx.objects.base import ScopedStore
from phalanx.rpc import NotFound, Superseded
from phalanx.trainer.places import job_store

NAME = JobName("default", "tiny")


def entry(number, kind="skip", position=0, attempt=1, **payload):
    return JournalEntry(attempt, number, kind, position, payload, f"r{number}")


def test_zero_weight_of_skips_and_damages_stands_in_the_journals_order():
    entries = (
        entry(1, position=8, num_windows=3),
        entry(2, "mixture", 9, anything=1),
        entry(3, "damage", 4, zero_weight=[[4, 6], [9, 12]], action="skip"),
        entry(4, "damage", 5, zero_weight=[], action="stop"),
        entry(5, "damaged_checkpoint", 5),
    )
    assert zero_weight_spans(entries) == ((8, 11), (4, 6), (9, 12))


@given(st.integers(0, 10**6), st.integers(0, 5000), st.integers(1, 64), st.integers(64, 2048))
def test_plan_reaches_as_far_as_asked_and_never_past_the_policy(step, asked, usual, most):
    view = JournalView(3, (entry(1, num_windows=2),))
    plan = plan_for("a job", view, 3, step, asked, HorizonPolicy(usual, most))
    assert plan.horizon_step == step + (min(asked, most) if asked else usual)
    assert plan.zero_weight == ((0, 2),) and plan.journal_digest == journal_digest(view.entries)


def test_plan_by_default_is_the_one_that_storage_control_makes():
    entries = (entry(1, num_windows=2),)
    assert plan_for("a job", JournalView(1, entries), 1, 7, 0, HorizonPolicy()) == reading_plan(entries, 7)
    assert HorizonPolicy().usual == HORIZON_STEPS


@pytest.mark.parametrize(("newest", "attempt"), [(2, 1), (9, 8), (9, 1)])
def test_attempt_before_the_newest_is_superseded(newest, attempt):
    with pytest.raises(Superseded, match=f"attempt {attempt} of j: .* attempt {newest} has been opened since"):
        require_newest("j", newest, attempt)


@pytest.mark.parametrize(("newest", "attempt"), [(0, 0), (0, 1), (2, 3), (2, 0), (2, -1)])
def test_attempt_that_was_never_opened_is_not_found(newest, attempt):
    with pytest.raises(NotFound, match=r"the newest is|has none yet"):
        require_newest("j", newest, attempt)


@pytest.mark.parametrize(("step", "asked", "key"), [(-1, 0, "step"), (0, -1, "horizon_steps")])
def test_plan_of_negative_numbers_names_the_field(step, asked, key):
    with pytest.raises(PhalanxError, match=f"^{key} is -1: expected 0 or more"):
        plan_for("j", JournalView(1, ()), 1, step, asked, HorizonPolicy())


@pytest.mark.parametrize(("usual", "most"), [(0, 5), (6, 5), (-1, 5)])
def test_horizon_policy_that_grants_nothing_is_refused(usual, most):
    with pytest.raises(PhalanxError, match=r"options.horizon_steps"):
        HorizonPolicy(usual, most)


class OneJob:
    """The only registered job."""

    def __init__(self, job, store=None):
        self.found = FoundJob(NAME, job, store or job_store(job))

    def find(self, name):
        return self.found if name == NAME else None

    def current(self, found):
        return found.job


class CountingStore(ScopedStore):
    """Counts what is asked of it."""

    def __init__(self, store, calls):
        super().__init__(store, "projects/default/jobs/tiny")
        self.calls = calls

    def read(self, key, offset=0, length=None):
        self.calls.append(("read", key))
        return super().read(key, offset, length)

    def list(self, prefix=""):
        self.calls.append(("list", prefix))
        return super().list(prefix)


@pytest.fixture
def job(tmp_path):
    data = write_dataset(f"file://{tmp_path}/data")
    return make_job(f"file://{tmp_path}/store", f"{data}/train")


def reading_of(job, calls=None):
    store = None if calls is None else CountingStore(open_store(job.job.storage), calls)
    return Reading(OneJob(job, store), Journals(), HorizonPolicy())


def test_plan_follows_the_journal_as_storage_has_it(job):
    reading = reading_of(job)
    attempt = open_attempt(job)
    lineage = Lineage(job_store(job))
    for number in range(3):
        lineage.append_journal(attempt, "skip", 10 * number, {"num_windows": 2})
        assert reading.plan(NAME, attempt, 5, 0) == reading_plan(lineage.journal(attempt), 5)


def test_plan_of_an_attempt_inherits_what_its_parents_journal_says(job):
    reading = reading_of(job)
    lineage = Lineage(job_store(job))
    open_attempt(job)
    lineage.append_journal(1, "skip", 3, {"num_windows": 2})
    assert reading.plan(NAME, 1, 0, 0).zero_weight == ((3, 5),)
    open_attempt(job)
    assert reading.plan(NAME, 2, 0, 0) == reading_plan(lineage.journal(2), 0)
    with pytest.raises(Superseded):
        reading.plan(NAME, 1, 0, 0)


def test_plan_again_lists_and_reads_nothing(job):
    calls: list[tuple[str, str]] = []
    reading = reading_of(job, calls)
    open_attempt(job)
    first = reading.plan(NAME, 1, 0, 0)
    calls.clear()
    assert reading.plan(NAME, 1, 0, 0) == first
    assert [kind for kind, _ in calls] == ["list", "list"]


def test_plan_never_serves_an_attempt_that_was_superseded_before_the_call(job):
    """The cache is asked after the attempts are listed, by however many threads."""
    reading, problems = reading_of(job), []
    open_attempt(job)

    def ask(attempt):
        for _ in range(10):
            try:
                reading.plan(NAME, attempt, 0, 0)
            except Superseded:
                continue
            problems.append(attempt)

    for newest in range(2, 6):
        reading.plan(NAME, newest - 1, 0, 0)
        open_attempt(job)
        threads = [threading.Thread(target=ask, args=[attempt]) for attempt in range(1, newest)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert problems == []


def test_plan_of_an_unknown_job_is_not_found(job):
    with pytest.raises(NotFound, match="projects/default/jobs/other"):
        reading_of(job).plan(JobName("default", "other"), 1, 0, 0)


def test_plan_before_the_first_attempt_is_not_found(job):
    with pytest.raises(NotFound, match="it has none yet"):
        reading_of(job).plan(NAME, 1, 0, 0)


def test_plan_for_a_held_out_split_is_refused(tmp_path):
    write_split(open_store(f"file://{tmp_path}/data"), [[5, 6]], is_held_out=True)
    job = make_job(f"file://{tmp_path}/store", f"file://{tmp_path}/data")
    open_attempt(job)
    with pytest.raises(PhalanxError, match="was held out for evaluation"):
        reading_of(job).plan(NAME, 1, 0, 0)
