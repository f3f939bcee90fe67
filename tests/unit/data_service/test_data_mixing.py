"""Wishes for other weights: what is refused, that each counts once, and from where on they hold when plans are made."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.data.jobs import FoundJob, Journals
from phalanx.data.mixing import check_weights, parsed_weight, wish_for_weights
from phalanx.data.plans import HorizonPolicy
from phalanx.data.reading import Reading
from phalanx.lineage import CheckpointRef, DamagedObject, Lineage, LoaderState, Manifest
from phalanx.lineage.journal import journal_digest
from phalanx.lineage.plan import MIXTURE_KIND, SKIP_KIND
from phalanx.lineage.registry import JobName
from phalanx.lineage.wishes import Wishes, grant
from phalanx.objects import ObjectStore, open_store
from phalanx.spec import Job, parse_job

BATCH = 8
DIGEST = "sha256:" + "0" * 64


def job_of(**sources: float) -> Job:
    named = {name: {"url": f"memory://{name}", "weight": weight} for name, weight in sources.items()}
    data = {"sources": named} if named else {"train": "memory://train"}
    return parse_job(
        {
            "job": {"name": "mixed", "storage": "memory://store"},
            "model": {"preset": "tiny"},
            "data": data,
            "training": {"seq_len": 16, "steps": 100, "global_batch_size": BATCH},
            "optimizer": {"lr": 1e-3},
        }
    )


MIXED = job_of(web=3, code=1)


class OneJob:
    """A registry of one job whose lineage is in memory."""

    def __init__(self, store: ObjectStore, job: Job = MIXED) -> None:
        self.found = FoundJob(JobName("default", "mixed"), job, store)

    def find(self, name: JobName) -> FoundJob | None:
        return self.found if name == self.found.name else None

    def current(self, found: FoundJob) -> Job:
        return found.job


class Bench:
    """The data service's plans for one job."""

    def __init__(self, name: str) -> None:
        self.store = open_store(f"memory://mixing-{name}")
        self.lineage, self.jobs = Lineage(self.store), OneJob(self.store)
        self.reading = self.service()
        self.open()

    def service(self) -> Reading:
        return Reading(self.jobs, Journals(), HorizonPolicy(), look=lambda job: None)

    def open(self) -> int:
        return self.lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={}).number

    def commit(self, attempt: int, step: int) -> None:
        digests = (DIGEST, DIGEST, DIGEST, journal_digest(()))
        self.lineage.commit(Manifest(attempt, step, 1, *digests, LoaderState(step, step * BATCH), {}, (), ()))

    def plan(self, attempt: int, step: int):
        return self.reading.plan(self.jobs.found.name, attempt, step, 0)

    def wish(self, request: str, **weights: str) -> int:
        return self.reading.wish(self.jobs.found.name, weights, request).number

    def changes(self, attempt: int, step: int) -> list[tuple[int, dict[str, str]]]:
        return [(each.position, dict(each.weights)) for each in self.plan(attempt, step).mixture]


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(f"{request.node.name}")


@pytest.mark.parametrize(
    "weights, told",
    [
        ({}, "one at least"),
        ({"books": "1"}, r"one of the job's sources \(code, web\)"),
        ({"code": "-1"}, "a number of 0 or more"),
        ({"code": "nan"}, "a number of 0 or more"),
        ({"code": "inf"}, "a number of 0 or more"),
        ({"code": ""}, "a number of 0 or more"),
        ({"code": "1/0"}, "a number of 0 or more"),
        ({"code": "1e9999999"}, "a number of 0 or more"),
        ({"code": "1e-9999999"}, "a number of 0 or more"),
        ({"code": "9" * 100}, "a number of 0 or more"),
        ({"code": "0", "web": "0.0"}, r"^weights code=0, web=0\.0: expected one above 0 at least"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights: dict[str, str], told: str) -> None:
    with pytest.raises(PhalanxError, match=told):
        check_weights(MIXED, weights)


def test_weights_of_a_job_of_one_split_are_refused() -> None:
    with pytest.raises(PhalanxError, match=r"data\.sources"):
        check_weights(job_of(), {"train": "1"})


@pytest.mark.parametrize("text, value", [("0.3", (3, 10)), ("1/3", (1, 3)), ("2", (2, 1)), ("1e-3", (1, 1000))])
def test_weight_is_taken_exactly_as_it_is_written(text: str, value: tuple[int, int]) -> None:
    assert parsed_weight("code", text).as_integer_ratio() == value


def test_wish_holds_from_the_first_window_that_no_plan_has_shown(bench: Bench) -> None:
    assert bench.plan(1, 0).horizon_step == 16
    assert bench.wish("a", code="2") == 1
    assert bench.changes(1, 16) == [(16 * BATCH, {"code": "2"})]
    assert bench.changes(1, 32) == [(16 * BATCH, {"code": "2"})]


def test_wish_that_meets_a_plan_which_is_asked_for_again_holds_behind_its_horizon(bench: Bench) -> None:
    """The answer to the first call may be on its way to a rank that will read up to its horizon."""
    bench.plan(1, 0)
    bench.wish("a", code="2")
    assert bench.changes(1, 0) == [(16 * BATCH, {"code": "2"})]


def test_wish_repeated_under_its_id_counts_once(bench: Bench) -> None:
    assert [bench.wish("a", code="2"), bench.wish("b", web="5"), bench.wish("a", code="2")] == [1, 2, 1]
    assert [weights for _, weights in bench.changes(1, 0)] == [{"code": "2"}, {"web": "5"}]


def test_wish_for_other_weights_under_a_used_request_id_is_refused(bench: Bench) -> None:
    bench.wish("a", code="2")
    with pytest.raises(PhalanxError, match=r'request id is \'a\'.*wish 1 again.*"code":"2".*not.*"code":"3"'):
        bench.wish("a", code="3")
    assert len(Wishes(bench.store).all()) == 1 and bench.wish("a", code="2") == 1


def test_wish_for_a_job_that_is_done_is_refused_unless_it_is_known(bench: Bench) -> None:
    bench.wish("a", code="2")
    bench.commit(1, 99)
    assert bench.wish("b", web="5") == 2
    bench.commit(1, 100)
    with pytest.raises(PhalanxError, match=r"job mixed is 'done, at step 100'.*steps to train"):
        bench.wish("c", code="3")
    assert bench.wish("a", code="2") == 1
    assert wish_for_weights(bench.store, MIXED, {"code": "3"}, "c", steps=120).number == 3


def test_wish_that_leaves_no_source_with_those_before_it_is_refused(bench: Bench) -> None:
    """Whether the one before it is granted or not; the run would end without a word."""
    bench.plan(1, 0)
    for is_granted in (False, True):
        if is_granted:
            assert bench.changes(1, 16) == [(16 * BATCH, {"code": "0"})]
        else:
            bench.wish("a", code="0")
        with pytest.raises(PhalanxError, match=r"^weights web=0: expected one source above 0 at least"):
            bench.wish("b", web="0")
    assert bench.wish("c", web="0", code="1") == 2
    assert bench.wish("d", web="1") == 3
    assert bench.wish("e", code="0") == 4


def test_wish_for_no_source_by_the_weights_of_the_job_file_is_refused(bench: Bench) -> None:
    with pytest.raises(PhalanxError, match=r"^weights web=0: expected one source above 0"):
        wish_for_weights(bench.store, job_of(web=3, code=0), {"web": "0"}, "a")


def test_wishes_at_once_are_all_kept_and_numbered(bench: Bench) -> None:
    def many(number: int) -> None:
        wish_for_weights(bench.store, MIXED, {"code": str(number)}, f"request-{number}")

    threads = [threading.Thread(target=many, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    wishes = Wishes(bench.store).all()
    assert [wish.number for wish in wishes] == list(range(1, 9))
    assert {wish.payload["weights"]["code"] for wish in wishes} == {str(number) for number in range(8)}


def test_wish_granted_in_an_attempt_without_a_checkpoint_holds_from_the_same_window_in_the_next(bench: Bench) -> None:
    bench.plan(1, 0)
    bench.wish("a", code="2")
    assert bench.changes(1, 16) == [(128, {"code": "2"})]
    assert bench.open() == 2
    assert bench.changes(2, 0) == [(128, {"code": "2"})]
    assert [entry.attempt for entry in bench.lineage.all_journal_entries()] == [1, 2]


def test_wish_granted_before_a_checkpoint_stays_where_it_was(bench: Bench) -> None:
    bench.plan(1, 0)
    bench.wish("a", code="2")
    bench.changes(1, 16)
    bench.commit(1, 20)
    assert bench.open() == 2 and bench.changes(2, 20) == [(128, {"code": "2"})]
    assert len(list(bench.lineage.all_journal_entries())) == 1


def test_wish_that_only_a_zombie_granted_never_holds_where_the_living_have_read(bench: Bench) -> None:
    bench.commit(1, 40)
    bench.open()
    bench.plan(2, 40)
    bench.wish("a", code="2")
    zombie = bench.lineage.journal(1)
    assert grant(bench.lineage, Wishes(bench.store), 1, zombie, 8 * BATCH)
    assert bench.changes(2, 56) == [(56 * BATCH, {"code": "2"})]


def test_wish_behind_windows_taken_out_by_position_leaves_them_what_they_are(bench: Bench) -> None:
    bench.lineage.append_journal(1, SKIP_KIND, 100, {"num_windows": 60})
    bench.wish("a", code="2")
    assert bench.changes(1, 0) == [(160, {"code": "2"})]


def test_service_that_died_between_two_plans_grants_after_the_one_that_was_shown(bench: Bench) -> None:
    bench.plan(1, 0)
    bench.wish("a", code="2")
    bench.reading = bench.service()
    assert bench.changes(1, 16) == [(16 * BATCH, {"code": "2"})]


def test_wish_that_is_damaged_is_named(bench: Bench, tmp_path: Path) -> None:
    bench.wish("a", code="2")
    bench.store.create("wishes/00000003.json", b"{}")
    with pytest.raises(DamagedObject, match="wish 2 before it is missing"):
        bench.plan(1, 0)


def test_changes_of_one_job_never_run_backwards(bench: Bench) -> None:
    bench.lineage.append_journal(1, MIXTURE_KIND, 500, {"weights": {"web": "1"}})
    bench.wish("a", code="2")
    assert [position for position, _ in bench.changes(1, 0)] == [500, 500]


def test_checkpoint_that_is_avoided_takes_no_change_with_it(bench: Bench) -> None:
    bench.plan(1, 0)
    bench.commit(1, 10)
    bench.wish("a", code="2")
    bench.changes(1, 16)
    bench.commit(1, 20)
    bench.lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={}, avoid=[CheckpointRef(1, 20)])
    assert bench.changes(2, 10) == [(128, {"code": "2"})]
