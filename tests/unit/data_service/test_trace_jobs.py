"""The trace of a job follows its lineage: journal, attempts, forks."""

from __future__ import annotations

import numpy as np
import pytest
from support.datasets import DIGEST, make_job, open_attempt, write_dataset

from phalanx.core.digest import digest_of
from phalanx.core.errors import PhalanxError
from phalanx.data.job_proof import prove_job
from phalanx.data.job_tracing import Trained, tracer_of, trained
from phalanx.lineage import ForkPoint, Lineage, LoaderState, Manifest, WindowRows, journal_digest
from phalanx.spec.job import plain
from phalanx.trainer.mixing import training_splits
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import identity_of

BATCH = 4


@pytest.fixture
def job(tmp_path):
    data = write_dataset(f"file://{tmp_path}/data")
    return make_job(f"file://{tmp_path}/jobs", f"{data}/train", steps=40)


def windows(job, step):
    return {segment.window: segment.weight for segment in tracer_of(job).step(step)}


def create(job, origin=None):
    """What is stored of a job when it is started."""
    splits = training_splits(job)
    digest = job.identity_digest({name: split.digest for name, split in splits.items()})
    Lineage(job_store(job)).create_job(
        request_id="r", spec=plain(job), identity=identity_of(job, splits), identity_digest=digest, origin=origin
    )


def save(lineage, attempt, first_step, step, commit=True):
    """Records of steps, and the checkpoint that names them."""
    count = (step - first_step + 1) * BATCH
    none = np.zeros(0, np.int64)
    rows = WindowRows(
        step=np.repeat(np.arange(first_step, step + 1), BATCH),
        position=np.arange((first_step - 1) * BATCH, step * BATCH),
        weight=np.ones(count, np.float32),
        xxh3=np.zeros(count, np.uint64),
        segment_window=none,
        shard=none,
        member=none,
        offset=none,
        length=none,
    )
    ref = lineage.records.put(attempt, 0, first_step, step, rows, None)
    digests = (DIGEST, digest_of({}), DIGEST, journal_digest(()))
    if commit:
        lineage.commit(Manifest(attempt, step, 1, *digests, LoaderState(step, step * BATCH), {}, (ref,), ()))


def test_trace_of_a_job_that_never_started_is_that_of_its_file(job):
    assert windows(job, 3) == {8: 1, 9: 1, 10: 1, 11: 1}
    assert trained(job, 3) == Trained(None, ())


def test_trace_follows_the_live_journal_and_no_other(job):
    lineage = Lineage(job_store(job))
    attempt = open_attempt(job)
    lineage.append_journal(attempt, "skip", 9, {"num_windows": 2})
    assert windows(job, 3) == {8: 1, 9: 0, 10: 0, 11: 1}
    open_attempt(job)  # the first left no checkpoint: its journal falls away
    assert windows(job, 3) == {8: 1, 9: 1, 10: 1, 11: 1}


def test_trace_says_which_attempt_trained_a_step_and_which_in_vain(job):
    lineage = Lineage(job_store(job))
    first = open_attempt(job)
    save(lineage, first, 1, 5)
    save(lineage, first, 6, 9, commit=False)
    second = open_attempt(job)
    assert [trained(job, step) for step in (5, 6)] == [Trained(1, ()), Trained(None, (1,))]
    save(lineage, second, 6, 10)
    assert [trained(job, step) for step in (1, 5, 6, 9, 10, 11)] == [
        Trained(1, ()),
        Trained(1, ()),
        Trained(2, (1,)),
        Trained(2, (1,)),
        Trained(2, ()),
        Trained(None, ()),
    ]


def test_trace_of_a_fork_with_another_batch_goes_on_where_its_origin_stood(job, tmp_path):
    more = {"training": {"global_batch_size": 6}}
    fork = make_job(f"file://{tmp_path}/jobs", job.data.train, "fork", steps=40, more=more)
    origin = ForkPoint("default", "tiny", 1, 5, 20)
    create(fork, origin)
    assert set(windows(fork, 6)) == set(range(20, 26)) and set(windows(fork, 8)) == set(range(32, 38))
    with pytest.raises(PhalanxError, match="the steps up to 5 are those of job tiny"):
        windows(fork, 5)
    for segment in list(tracer_of(fork).step(8))[:3]:
        steps = {
            step
            for visit in tracer_of(fork).document(segment.document_id, 8)
            if segment.window in visit.windows
            for step in visit.steps
        }
        assert 8 in steps and min(steps) > 5


def test_trace_with_other_data_than_the_job_names_is_refused(job, tmp_path):
    other = make_job(
        f"file://{tmp_path}/jobs", job.data.train, "other", more={"data": {"train_digest": "sha256:" + "0" * 64}}
    )
    with pytest.raises(PhalanxError, match="sha256:"):
        tracer_of(other)


@pytest.mark.parametrize("key, value, was", [("seed", 5, ""), ("seq_len", 32, "16"), ("global_batch_size", 8, "4")])
def test_job_file_of_another_identity_than_the_run_is_refused(job, tmp_path, key, value, was):
    create(job)
    assert windows(job, 1)
    prove_job(job)
    other = make_job(f"file://{tmp_path}/jobs", job.data.train, steps=40, more={"training": {key: value}})
    for ask in (tracer_of, prove_job):
        with pytest.raises(PhalanxError, match=rf"training\.{key} = {value} \(was {was}.*the identity with which"):
            ask(other)


def test_job_file_of_the_run_with_other_free_keys_is_still_that_run(job, tmp_path):
    create(job)
    more = {"checkpoint": {"interval": 7}, "lr_scheduler": {"total_steps": 40}}
    other = make_job(f"file://{tmp_path}/jobs", job.data.train, steps=50, more=more)
    assert windows(other, 3) == windows(job, 3)
    prove_job(other)
