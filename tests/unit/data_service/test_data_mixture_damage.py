"""A damaged shard of one source of a mixture: its windows of that source's own stream are taken out, whatever the
weights become, the others go on, and the proof holds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.datasets import DIGEST, job_tables, open_attempt, write_dataset

from phalanx.core.digest import digest_of
from phalanx.data.decisions import Action
from phalanx.data.job_proof import prove_job
from phalanx.data.job_tracing import tracer_of
from phalanx.data.jobs import FoundJob, Journals
from phalanx.data.left_out import left_out_by
from phalanx.data.plans import HorizonPolicy
from phalanx.data.reading import Reading
from phalanx.data.reports import Reports
from phalanx.data.wire import damage_from, damage_message
from phalanx.lineage import Lineage, LoaderState, Manifest, WindowRows, journal_digest
from phalanx.lineage.plan_message import plan_message, plan_of
from phalanx.lineage.registry import JobName
from phalanx.rpc import NotFound
from phalanx.spec import parse_job
from phalanx.stream.members import DamagedShard
from phalanx.stream.windows import MixtureReader
from phalanx.trainer.mixing import JobReading
from phalanx.trainer.places import job_store

NAME = JobName("default", "tiny")
BATCH, STEPS = 4, 60
SHARD = "web/t-00000002.tar"


class Bench:
    """A job of two sources, the service's plans and decisions, and a run without a model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for seed, name in enumerate(("code", "web"), 1):
            write_dataset(f"file://{folder}/{name}", num_shards=4 + seed, seed=seed)
        tables = job_tables(f"file://{folder}/store", None, steps=STEPS, more={"recovery": {"on_bad_shard": "skip"}})
        tables["recovery"]["bad_shard_budget"] = 1.0
        tables["data"]["sources"] = {
            "web": {"url": f"file://{folder}/web/train", "weight": 3},
            "code": {"url": f"file://{folder}/code/train", "weight": 1},
        }
        self.job = parse_job(tables)
        self.lineage = Lineage(job_store(self.job))
        self.found = FoundJob(NAME, self.job, job_store(self.job))
        self.reports = Reports(self, Journals(), lambda action: None)
        self.plans = Reading(self, Journals(), HorizonPolicy())

    def find(self, name: JobName) -> FoundJob:
        return self.found

    def current(self, found: FoundJob):
        return found.job

    def reading(self) -> JobReading:
        """Orders with indices read afresh."""
        return JobReading.of(self.job, None)

    def damage(self, key: str) -> None:
        source, _, name = key.partition("/")
        path = self.folder / source / "train" / name
        data = bytearray(path.read_bytes())
        data[700] ^= 1
        path.write_bytes(data)

    def train(self, attempt: int, every: int = 5) -> None:
        """Reads and records windows as a rank would, plan by plan, saving every few steps."""
        newest = self.lineage.newest_attempt()
        assert newest is not None
        step, reading = newest.start_step, self.reading()
        plan = self.plans.plan(NAME, attempt, step, every)
        with MixtureReader(reading.sources, reading.view_of(plan), True, num_threads=1) as reader:
            while step < STEPS:
                plan = self.plans.plan(NAME, attempt, step, every)
                reader.follow(reading.view_of(plan_of(plan_message(plan))))
                rows, first_step = [], step + 1
                while step < min(STEPS, plan.horizon_step):
                    step += 1
                    positions = np.arange((step - 1) * BATCH, step * BATCH)
                    try:
                        batch = reader.read(positions)
                    except DamagedShard as damage:
                        damage.args = (*damage.args, reading.key_of(damage.shard, damage.key), step)
                        raise
                    assert reader.valid_targets(positions) == int((batch.targets >= 0).sum())
                    columns = {name: getattr(batch.rows, name) for name in type(batch.rows).__dataclass_fields__}
                    rows.append(WindowRows(step=np.full(BATCH, step), **columns))
                ref = self.lineage.records.put(attempt, 0, first_step, step, WindowRows.concatenate(rows), None)
                digests = (DIGEST, digest_of({}), DIGEST, journal_digest(()))
                loader = LoaderState(step, step * BATCH)
                self.lineage.commit(Manifest(attempt, step, 1, *digests, loader, {}, (ref,), ()))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    open_attempt(bench.job)
    return bench


def windows_that_read(bench: Bench, source: int, shard: int, stop: int) -> set[int]:
    order = bench.reading().sources[source].order
    return {window for window in range(stop) if shard in order.window(window).shard.tolist()}


def windows_in(spans) -> set[int]:
    return {window for start, stop in spans for window in range(start, stop)}


def test_decision_names_windows_of_the_source_and_shards_through_all_sources(bench: Bench) -> None:
    bench.damage(SHARD)
    damage = bench.reports.report(NAME, 1, SHARD, "digest", 1)
    assert (damage.action, damage.source, damage.zero_weight) == (Action.SKIP, "web", ())
    expected = windows_that_read(bench, 1, 2, STEPS * BATCH * 3 // 4)
    assert windows_in(damage.windows) == expected and expected
    (entry,) = bench.lineage.journal(1)
    assert entry.payload["number"] == 5 + 2 and entry.payload["objects"] == [SHARD]
    assert damage_from(damage_message(damage)) == damage
    assert bench.plans.plan(NAME, 1, 0, 0).lost == (("web", damage.windows),)
    assert bench.reports.report(NAME, 1, SHARD, "again", 9) == damage


@pytest.mark.parametrize("key", ["t-00000002.tar", "books/t-00000002.tar", "web/t-00000099.tar", "web", ""])
def test_report_of_no_shard_of_a_source_is_not_found(bench: Bench, key: str) -> None:
    with pytest.raises(NotFound):
        bench.reports.report(NAME, 1, key, "x", 1)


@pytest.mark.parametrize("what", ["tar", "index"])
def test_run_past_a_damaged_shard_of_one_source_with_a_change_of_weights_after_it_is_proved(
    bench: Bench, what: str
) -> None:
    bench.damage(SHARD)
    if what == "index":
        (bench.folder / "web/train/t-00000002.index.safetensors").unlink()
    reported = []
    for _ in range(8):
        newest = bench.lineage.newest_attempt()
        assert newest is not None
        try:
            bench.train(newest.number)
        except DamagedShard as damage:
            _, key, step = damage.args
            decision = bench.reports.report(NAME, newest.number, key, damage.why, step)
            assert decision.action is Action.SKIP and decision.source == "web"
            reported.append(decision)
            bench.plans.wish(NAME, {"web": str(2 + len(reported))}, f"change {len(reported)}")
            open_attempt(bench.job)
        else:
            break
    proof = prove_job(bench.job)
    assert proof.ok and (proof.steps, proof.windows) == (STEPS, STEPS * BATCH), proof
    assert reported and 0 < proof.windows_left_out < STEPS * BATCH
    plan = left_out_by(bench.lineage).plan
    assert plan.mixture and plan.lost and not plan.zero_weight
    view = bench.reading().view_of(plan)
    sources, _ = view.place(np.flatnonzero(view.left_out(np.arange(STEPS * BATCH))))
    assert set(sources.tolist()) == {1}


def test_trace_of_a_mixture_finds_documents_of_each_source_and_back(bench: Bench) -> None:
    bench.train(1)
    tracer = tracer_of(bench.job)
    segments = list(tracer.step(7))
    assert {segment.source for segment in segments} == {"code", "web"}
    for segment in segments[:6]:
        visits = list(tracer.document(segment.document_id, 3))
        assert any(segment.source == visit.source and segment.window in visit.windows for visit in visits)


def test_proof_of_a_mixture_that_was_read_by_other_weights_names_the_windows(bench: Bench) -> None:
    bench.lineage.append_journal(1, "mixture", 40, {"weights": {"code": "3"}})
    bench.train(1)
    assert prove_job(bench.job).ok
    data = bench.job.data
    half = {**data.sources, "web": data.sources["web"].model_copy(update={"weight": 1.5})}
    other = bench.job.model_copy(update={"data": data.model_copy(update={"sources": half})})
    proof = prove_job(other)
    assert not proof.ok and any("its segments are not those" in each for each in proof.mismatches)
