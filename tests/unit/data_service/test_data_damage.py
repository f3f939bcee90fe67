"""Decisions about damaged shards: which windows a shard costs, by brute force; one decision however often it is asked;
and a run that goes on past the damage and can be proved.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.datasets import DIGEST, make_job, open_attempt, write_dataset, write_split

from phalanx.core.digest import digest_of
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.damage import (
    MAX_SPANS,
    Finding,
    allowed_shards,
    damages_in,
    decide,
    lost_windows,
    reach_of,
    request_id_of,
)
from phalanx.data.decisions import Action
from phalanx.data.job_proof import prove_job
from phalanx.data.jobs import FoundJob, Journals
from phalanx.data.plans import HorizonPolicy
from phalanx.data.reading import Reading
from phalanx.data.reports import MAX_WHY, Reports, look_at, shard_number
from phalanx.lineage import JournalEntry, Lineage, LoaderState, Manifest, WindowRows, journal_digest
from phalanx.lineage.plan import ReadingPlan, zero_weight_spans
from phalanx.lineage.registry import JobName
from phalanx.objects import StoreError, open_store
from phalanx.objects.base import ScopedStore
from phalanx.rpc import NotFound, Superseded
from phalanx.stream import DamagedShard, Order, ShardIndices, WindowReader, open_split
from phalanx.trainer.places import job_store, order_of, store_at

NAME = JobName("default", "tiny")
BATCH = 4


class OneJob:
    """The only registered job."""

    def __init__(self, job):
        self.found = FoundJob(NAME, job, job_store(job))

    def find(self, name):
        return self.found if name == NAME else None

    def current(self, found):
        return found.job


class Bench:
    """A job on its data, and the service's decisions about it."""

    def __init__(self, folder: Path, policy: str = "skip", steps: int = 40, num_shards: int = 6, budget: float = 1.0):
        self.folder = folder
        if not (folder / "corpus").exists():
            write_dataset(f"file://{folder}/corpus", num_shards=num_shards)
        more = {"recovery": {"on_bad_shard": policy, "bad_shard_budget": budget}}
        self.job = make_job(f"file://{folder}/store", f"file://{folder}/corpus/train", steps=steps, more=more)
        self.lineage = Lineage(job_store(self.job))
        self.counted: list[Action] = []
        self.reports = Reports(OneJob(self.job), Journals(), self.counted.append)
        self.plans = Reading(OneJob(self.job), Journals(), HorizonPolicy())
        self.split = open_split(store_at(self.job, self.job.data.train))

    def order(self) -> Order:
        """The job's order, with indices read afresh."""
        return order_of(self.job, store_at(self.job, self.job.data.train), self.split)

    def object(self, key: str) -> Path:
        return self.folder / "corpus" / "train" / key

    def damage(self, key: str) -> None:
        """Flips a bit: of a tar, in the tokens of its first member."""
        path = self.object(key)
        data = bytearray(path.read_bytes())
        data[700 if key.endswith(".tar") else len(data) // 2] ^= 1
        path.write_bytes(data)

    def report(self, shard: str, attempt: int = 1, step: int = 1, why: str = "digest"):
        return self.reports.report(NAME, attempt, shard, why, step)

    def reading(self, shard: int) -> set[int]:
        """Windows of the whole job that read a shard, token by token."""
        order, found = self.order(), set()
        for position in range(self.job.training.steps * BATCH):
            if shard in order.window(position).shard.tolist():
                found.add(position)
        return found

    # A run without a model.

    def train(self, attempt: int, last_step: int, every: int = 5) -> int:
        """Reads and records windows as a rank would, saving every few steps; the step reached."""
        newest = self.lineage.newest_attempt()
        step = newest.start_step
        plan = self.plans.plan(NAME, attempt, step, 0)
        store = store_at(self.job, self.job.data.train)
        with WindowReader(store, self.split, self.order(), True, zero_weight=plan.zero_weight, num_threads=1) as reader:
            while step < last_step:
                rows = []
                first_step = step + 1
                while step < last_step and (step - first_step + 1) < every:
                    step += 1
                    read = reader.read(np.arange((step - 1) * BATCH, step * BATCH)).rows
                    assert reader.valid_targets(np.arange((step - 1) * BATCH, step * BATCH)) >= 0
                    columns = {name: getattr(read, name) for name in type(read).__dataclass_fields__}
                    rows.append(WindowRows(step=np.full(BATCH, step), **columns))
                ref = self.lineage.records.put(attempt, 0, first_step, step, WindowRows.concatenate(rows), None)
                loader = LoaderState(step, step * BATCH)
                digests = (DIGEST, digest_of({}), DIGEST, journal_digest(()))
                self.lineage.commit(Manifest(attempt, step, 1, *digests, loader, {}, (ref,), ()))
        return step


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    open_attempt(bench.job)
    return bench


def positions_in(spans) -> set[int]:
    return {p for start, stop in spans for p in range(start, stop)}


@pytest.mark.parametrize("shard", range(6))
def test_skip_takes_out_exactly_the_windows_that_read_the_shard_to_the_end_of_the_job(bench, shard):
    bench.damage(f"t-{shard:08d}.tar")
    damage = bench.report(f"t-{shard:08d}.tar")
    assert damage.action is Action.SKIP and damage.journal_entry == 1
    assert positions_in(damage.zero_weight) == bench.reading(shard)
    assert zero_weight_spans(bench.lineage.journal(1)) == damage.zero_weight
    assert bench.job.training.steps * BATCH * 16 > 1.5 * bench.split.num_tokens, "more than one epoch"


def test_skip_within_the_budget_then_stop_that_names_it(tmp_path):
    bench = Bench(tmp_path, budget=0.4)
    open_attempt(bench.job)
    told = []
    for shard in range(3):
        bench.damage(f"t-{shard:08d}.tar")
        told.append(bench.report(f"t-{shard:08d}.tar"))
    assert [damage.action for damage in told] == [Action.SKIP, Action.SKIP, Action.STOP]
    assert "3 damaged shards of 6, recovery.bad_shard_budget allows 2" in told[2].why and not told[2].zero_weight
    assert bench.report("t-00000001.tar").action is Action.SKIP, "what was decided stays"
    assert bench.report("t-00000002.tar").action is Action.STOP


def test_budget_counts_a_shard_once_whatever_is_damaged_of_it(tmp_path):
    bench = Bench(tmp_path, budget=0.001)
    open_attempt(bench.job)
    bench.damage("t-00000002.tar")
    assert bench.report("t-00000002.tar").action is Action.SKIP
    bench.damage("t-00000002.index.safetensors")
    assert bench.report("t-00000002.index.safetensors").action is Action.SKIP


@pytest.mark.parametrize(
    "num_shards, budget, allowed",
    [(6, 0.001, 1), (1000, 0.001, 1), (5999, 0.001, 5), (1_000_000, 0.001, 1000), (10, 0, 0), (10, 1, 10), (1, 0.5, 1)],
)
def test_budget_is_a_share_of_the_shards_and_one_at_least(num_shards, budget, allowed):
    assert allowed_shards(num_shards, budget) == allowed


@pytest.mark.parametrize("both", [False, True])
def test_skip_of_a_lost_index_takes_out_its_block(bench, both):
    expected = set()
    for epoch in range(3):
        expected |= set(range(*bench.order().span_of_block(epoch, 2)))
    bench.object("t-00000002.index.safetensors").unlink()
    if both:
        bench.object("t-00000002.tar").unlink()
    damage = bench.report("t-00000002.index.safetensors")
    assert positions_in(damage.zero_weight) == {p for p in expected if p < 160}
    assert ("t-00000002.tar is missing" in damage.why) == both


def test_skip_of_a_tar_beside_another_lost_index_takes_out_the_block(bench):
    order = bench.order()
    blocks = {order.span_of_block(0, shard): shard for shard in range(6)}
    one = next(iter(blocks.values()))
    other = next(s for s in range(6) if s != one and order.span_of_block(0, s) == order.span_of_block(0, one))
    bench.damage(f"t-{one:08d}.tar")
    bench.object(f"t-{other:08d}.index.safetensors").unlink()
    damage = bench.report(f"t-{one:08d}.tar")
    assert positions_in(damage.zero_weight) >= set(range(*order.span_of_block(0, one)))


def test_stop_policy_stops_and_takes_nothing_out(tmp_path):
    bench = Bench(tmp_path, "stop")
    open_attempt(bench.job)
    bench.damage("t-00000001.tar")
    damage = bench.report("t-00000001.tar")
    assert (damage.action, damage.zero_weight, damage.journal_entry) == (Action.STOP, (), 1)
    assert zero_weight_spans(bench.lineage.journal(1)) == ()


def test_policy_that_was_changed_gets_another_decision(tmp_path):
    stopping = Bench(tmp_path, "stop")
    open_attempt(stopping.job)
    stopping.damage("t-00000001.tar")
    stopping.report("t-00000001.tar")
    skipping = Bench(tmp_path, "skip")
    assert skipping.report("t-00000001.tar").action is Action.SKIP
    assert [each.action for each in skipping.reports.damages(NAME)] == [Action.STOP, Action.SKIP]


def test_skip_that_would_leave_nothing_to_train_on_stops(tmp_path):
    bench = Bench(tmp_path, num_shards=1)
    open_attempt(bench.job)
    bench.damage("t-00000000.tar")
    assert bench.report("t-00000000.tar").action is Action.STOP


def test_report_of_a_whole_shard_says_retry_and_writes_nothing(bench):
    damage = bench.report("t-00000001.tar", why="timed out")
    assert (damage.action, damage.journal_entry, damage.why) == (Action.RETRY, 0, "timed out")
    assert bench.lineage.journal(1) == () and bench.reports.damages(NAME) == ()


def test_report_of_a_shard_that_was_repaired_after_a_stop_says_retry(tmp_path):
    bench = Bench(tmp_path, "stop")
    open_attempt(bench.job)
    bench.damage("t-00000001.tar")
    assert bench.report("t-00000001.tar").action is Action.STOP
    bench.damage("t-00000001.tar")
    assert bench.report("t-00000001.tar").action is Action.RETRY


def test_reports_again_and_from_many_ranks_at_once_give_one_entry(bench):
    bench.damage("t-00000001.tar")
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda n: bench.report("t-00000001.tar", step=1 + n % 3, why=f"rank {n}"), range(24)))
    assert len(found) == 1 and len(bench.lineage.journal(1)) == 1
    assert bench.counted == [Action.SKIP] * 24


def test_reports_by_two_services_at_once_give_one_entry(bench):
    """Their locks don't know of each other: the entry's request id does."""
    bench.damage("t-00000001.tar")
    services = [Reports(OneJob(bench.job), Journals(), bench.counted.append) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(lambda service: service.report(NAME, 1, "t-00000001.tar", "x", 1), services))
    assert len(found) == 1 and len(bench.lineage.journal(1)) == 1


def test_report_of_a_taken_out_shard_is_answered_without_reading_it(bench, monkeypatch):
    bench.damage("t-00000001.tar")
    first = bench.report("t-00000001.tar")
    monkeypatch.setattr("phalanx.data.reports.look_at", lambda *_: pytest.fail("it was read again"))
    assert bench.report("t-00000001.tar", step=30) == first


def test_report_of_the_index_after_the_tar_is_another_decision(bench):
    bench.damage("t-00000001.tar")
    bench.report("t-00000001.tar")
    bench.object("t-00000001.index.safetensors").unlink()
    second = bench.report("t-00000001.index.safetensors")
    assert second.journal_entry == 2 and len(bench.reports.damages(NAME)) == 2


def test_report_in_the_next_attempt_finds_the_inherited_decision(bench):
    bench.train(1, 5)
    bench.damage("t-00000001.tar")
    first = bench.report("t-00000001.tar", step=6)
    assert open_attempt(bench.job) == 2
    assert bench.report("t-00000001.tar", attempt=2, step=6) == first


def test_report_in_an_attempt_that_inherited_nothing_is_decided_anew(bench):
    """Attempt 1 left no checkpoint: its journal fell away with it."""
    bench.damage("t-00000001.tar")
    first = bench.report("t-00000001.tar")
    assert open_attempt(bench.job) == 2 and bench.lineage.journal(2) == ()
    second = bench.report("t-00000001.tar", attempt=2)
    assert (second.attempt, second.journal_entry, second.zero_weight) == (2, 1, first.zero_weight)


def test_report_of_a_job_that_was_made_longer_reaches_further(tmp_path):
    bench = Bench(tmp_path, steps=20)
    open_attempt(bench.job)
    bench.damage("t-00000001.tar")
    bench.report("t-00000001.tar")
    longer = Bench(tmp_path, steps=40)
    second = longer.report("t-00000001.tar", step=30)
    assert positions_in(second.zero_weight) == longer.reading(1)


def test_report_by_a_superseded_attempt_is_refused_and_writes_nothing(bench):
    bench.damage("t-00000001.tar")
    open_attempt(bench.job)
    with pytest.raises(Superseded):
        bench.report("t-00000001.tar", attempt=1)
    assert list(bench.lineage.all_journal_entries()) == []


@pytest.mark.parametrize("shard", ["", "x", "../../secret", "t-00000001", "t-00000001.ids.json", "t-00000099.tar"])
def test_report_of_no_shard_is_not_found(bench, shard):
    with pytest.raises(NotFound, match="expected the key of a shard's tar or index"):
        bench.report(shard)


def test_report_of_an_impossible_step_is_refused(bench):
    with pytest.raises(PhalanxError, match="step is 0"):
        bench.report("t-00000001.tar", step=0)


def test_report_keeps_one_short_line_of_what_the_reader_saw(bench):
    bench.damage("t-00000001.tar")
    why = bench.report("t-00000001.tar", why="a\nb\r\n" + "x" * 5000).why
    assert "\n" not in why and "(reader: a b x" in why and len(why) < MAX_WHY + 200


def test_shard_number_is_that_of_its_tar_and_its_index(bench):
    numbers = [shard_number(bench.split, f"t-0000000{n}.{end}") for n in (0, 5) for end in ("tar", "index.safetensors")]
    assert numbers == [0, 0, 5, 5]


class Flaky(ScopedStore):
    """Answers with wrong bytes the first time that an object is read, or fails."""

    def __init__(self, store, error=None):
        super().__init__(store, "train")
        self.asked, self.error = set(), error

    def read(self, key, offset=0, length=None):
        data = super().read(key, offset, length)
        if self.error is not None:
            raise self.error
        first = (key, offset) not in self.asked
        self.asked.add((key, offset))
        return bytes(len(data)) if first else data


def test_look_at_a_shard_that_reads_wrong_only_once_finds_nothing(bench):
    store = Flaky(open_store(f"file://{bench.folder}/corpus"))
    assert look_at(store, bench.split, 1, "t-00000001.tar", "x") is None


def test_look_at_a_store_that_fails_decides_nothing(bench):
    store = Flaky(open_store(f"file://{bench.folder}/corpus"), StoreError("the network is down"))
    with pytest.raises(OutsideError, match="the network is down"):
        look_at(store, bench.split, 1, "t-00000001.tar", "x")


# The pure rules.


def order_over(lengths, seq_len, block, seed=0):
    store = open_store("memory://")
    write_split(store, lengths)
    split = open_split(store)
    return Order(split, seed, seq_len, block, ShardIndices(store, split))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=5),
    st.integers(1, 16),
    st.integers(1, 3),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_lost_windows_are_those_that_a_reading_of_the_reach_touches(lengths, seq_len, block, start, length):
    order = order_over(lengths, seq_len, block)
    for shard in range(len(lengths)):
        finding = Finding("x", shard, "xxh3:0", ("x",), False, "")
        touched = {
            p
            for p in range(start, start + length)
            if shard in {segment.shard for segment in order.between(p * seq_len, (p + 1) * seq_len).rows()}
        }
        spans = lost_windows(order, finding, (start, start + length))
        assert positions_in(spans) == touched
        assert all(a < b for a, b in spans) and all(x[1] < y[0] for x, y in pairwise(spans))


def test_lost_windows_are_bounded_in_number(monkeypatch):
    order = order_over([[1] * 40, [1] * 40], 1, 2)
    finding = Finding("x", 0, "xxh3:0", ("x",), False, "")
    exact = lost_windows(order, finding, (0, 400))
    monkeypatch.setattr("phalanx.data.damage.MAX_SPANS", 5)
    bounded = lost_windows(order, finding, (0, 400))
    assert len(exact) > 5 == len(bounded) and positions_in(bounded) > positions_in(exact)
    assert MAX_SPANS > 1000


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 10**7))
def test_reach_begins_with_the_attempt_and_ends_with_the_job_or_some_epochs_on(start, reported, end):
    order = order_over([[10, 20], [30]], 7, 1)
    first, stop = reach_of(order, start, reported, end)
    assert first == start and stop <= end
    assert stop == end or stop * 7 >= (order.epoch_of(reported) + 65) * 60


@pytest.mark.parametrize(
    ("policy", "spans", "action"),
    [
        ("skip", ((0, 5),), Action.SKIP),
        ("skip", (), Action.SKIP),
        ("skip", ((0, 100),), Action.STOP),
        ("skip", ((40, 70), (70, 100)), Action.STOP),
        ("skip", ((0, 50), (51, 100)), Action.SKIP),
        ("stop", ((0, 5),), Action.STOP),
    ],
)
def test_decision_follows_the_policy_and_what_is_left(policy, spans, action):
    assert decide(policy, spans, 40, 100) is action


def test_request_id_tells_decisions_apart():
    finding = Finding("x", 0, "xxh3:0", ("x",), False, "")
    ids = {
        request_id_of(finding, Action.SKIP, (0, 5)),
        request_id_of(finding, Action.STOP, (0, 5)),
        request_id_of(finding, Action.SKIP, (0, 6)),
        request_id_of(Finding("x", 0, "xxh3:1", ("x",), False, ""), Action.SKIP, (0, 5)),
        request_id_of(Finding("x", 0, "xxh3:0", ("x", "y"), True, ""), Action.SKIP, (0, 5)),
    }
    assert len(ids) == 5
    assert request_id_of(finding, Action.SKIP, (0, 5)) == request_id_of(
        Finding("other words", 0, "xxh3:0", ("x",), False, "told otherwise"), Action.SKIP, (0, 5)
    )


def test_damages_are_the_decisions_among_the_entries():
    entries = [
        JournalEntry(1, 1, "skip", 0, {"num_windows": 3}, "a"),
        JournalEntry(1, 2, "damage", 0, {"num_windows": 3}, "b"),
        JournalEntry(
            2, 1, "damage", 4, {"shard": "s", "why": "w", "action": "skip", "zero_weight": [[4, 6]], "number": 0}, "c"
        ),
    ]
    (damage,) = damages_in(entries)
    assert (damage.shard, damage.attempt, damage.journal_entry, damage.zero_weight) == ("s", 2, 1, ((4, 6),))


# The whole way: a run meets damage, it is decided, the next attempt goes on, and the proof holds.


@pytest.mark.parametrize("lost", [["tar"], ["index.safetensors"], ["tar", "index.safetensors"], ["flip"]])
@pytest.mark.parametrize("damaged_at", [0, 15])
def test_run_past_a_damaged_shard_ends_and_is_proved(bench, lost, damaged_at):
    if damaged_at:
        bench.train(1, damaged_at)
    name = "t-00000002"
    for end in lost:
        bench.damage(f"{name}.tar") if end == "flip" else bench.object(f"{name}.{end}").unlink()
    reported = []
    for _ in range(8):
        attempt = bench.lineage.newest_attempt()
        try:
            bench.train(attempt.number, 40, every=5)
        except DamagedShard as damage:
            step = attempt.start_step + 1
            decision = bench.report(damage.key, attempt=attempt.number, step=step, why=damage.why)
            assert decision.action is Action.SKIP
            reported.append(decision)
            open_attempt(bench.job)
        else:
            break
    proof = prove_job(bench.job)
    assert proof.ok and proof.steps == 40 and proof.windows == 160, proof
    assert reported and proof.windows_left_out > 0
    assert proof.windows_left_out < 160


def test_run_that_leaves_windows_out_without_a_journal_is_not_proved(bench, monkeypatch):
    monkeypatch.setattr(bench.plans, "plan", lambda *_: ReadingPlan(100, ((3, 5),), DIGEST))
    bench.train(1, 40)
    proof = prove_job(bench.job)
    assert not proof.ok
    assert proof.mismatches == tuple(
        f"window {p} has weight 0, but no entry of the journal takes it out" for p in (3, 4)
    )


def test_decision_of_an_attempt_that_left_no_checkpoint_is_carried_into_the_next(bench):
    """Else every attempt would meet the damage anew, and its decision would fall away with it."""
    bench.damage("t-00000001.tar")
    first = bench.report("t-00000001.tar")
    for attempt in (2, 3, 4):
        assert open_attempt(bench.job) == attempt and bench.lineage.journal(attempt) == ()
        assert bench.plans.plan(NAME, attempt, 0, 0).zero_weight == first.zero_weight
        assert bench.plans.plan(NAME, attempt, 0, 0).zero_weight == first.zero_weight
        assert len(bench.lineage.journal(attempt)) == 1
        assert bench.report("t-00000001.tar", attempt=attempt).journal_entry == 1


def test_decision_that_is_inherited_is_not_carried(bench):
    bench.train(1, 5)
    bench.damage("t-00000001.tar")
    bench.report("t-00000001.tar", step=6)
    open_attempt(bench.job)
    bench.plans.plan(NAME, 2, 5, 0)
    assert [entry.attempt for entry in bench.lineage.journal(2)] == [1]


def test_decision_to_stop_and_other_entries_are_not_carried(tmp_path):
    bench = Bench(tmp_path, "stop")
    open_attempt(bench.job)
    bench.damage("t-00000001.tar")
    bench.report("t-00000001.tar")
    bench.lineage.append_journal(1, "skip", 3, {"num_windows": 2})
    open_attempt(bench.job)
    assert bench.plans.plan(NAME, 2, 0, 0).zero_weight == () and bench.lineage.journal(2) == ()
