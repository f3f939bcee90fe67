"""A run over two sources whose weights change while it goes, through a kill and another layout: each window of each
source is read once, in its order, and a second run with the same journal reads the same.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support.jobs import Run, assert_proven, lineage_of, run_cli, run_here, write_corpus
from support.mixtures import mixed_job, second_corpus

from phalanx.core.errors import PhalanxError
from phalanx.data.left_out import left_out_by
from phalanx.data.mixing import wish_for_weights
from phalanx.gang import Event, ForkServer
from phalanx.lineage.plan import HORIZON_STEPS, MIXTURE_KIND, MixtureChange
from phalanx.lineage.wishes import Wishes
from phalanx.spec import load_job
from phalanx.trainer.mixing import JobReading
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import Origin, prepare

BATCH, STEPS, RELAYOUT = 8, 28, 24


@pytest.fixture(scope="module")
def code(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """See `support.mixtures.second_corpus`."""
    return second_corpus(Path(tmp_path_factory.mktemp("code")), corpus)


def windows_read(path: Path) -> dict[int, int]:
    """The digest of what the model received of each window of the live lineage, by position."""
    rows = [windows for windows, _ in lineage_of(path).records.live()]
    return {
        position: digest
        for each in rows
        for position, digest in zip(each.position.tolist(), each.xxh3.tolist(), strict=True)
    }


@pytest.fixture(scope="module")
def mixed(corpus: str, code: str, server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job file of a run that was killed after step 5, whose weights were changed while its second attempt went on,
    and whose last four steps one rank read instead of two.
    """
    path = mixed_job(Path(tmp_path_factory.mktemp("mixed")), corpus, code, steps=STEPS)

    def trouble(run: Run, event: Event) -> None:
        if event.kind == "progress" and event.fields["step"] == 5 and run.tally.attempts == [1]:
            assert run.gang is not None
            os.kill(run.gang.pids[1], signal.SIGKILL)
        if event.kind == "opened" and event.rank == 0 and event.fields["attempt"] == 2:
            # In this process: a command takes longer than these steps.
            wish_for_weights(job_store(run.job), run.job, {"code": "6"}, "once")

    first = run_here(path, server, f"training.steps={RELAYOUT}", on_event=trouble)
    assert first.outcome is not None and first.outcome.ok and first.outcome.attempts == 2, first.outcome
    (told,) = first.of("mixture")
    assert told.fields["parts"] == pytest.approx({"code": 6 / 9, "web": 3 / 9})
    second = run_here(path, server, "cluster.nproc=1")
    assert second.outcome is not None and second.outcome.ok, second.outcome
    return path


def changes_of(path: Path) -> tuple[MixtureChange, ...]:
    """What the journal changes of the mixture."""
    return left_out_by(lineage_of(path)).plan.mixture


def test_mixture_through_a_kill_a_change_of_weights_and_a_relayout_is_proved(mixed: Path) -> None:
    told = run_cli(["data", "verify", mixed, "--json"])
    assert told.code == 0, told.err
    proof = json.loads(told.out)
    assert (proof["ok"], proof["steps"], proof["windows"]) == (True, STEPS, STEPS * BATCH) and proof["bytes_compared"]
    newest = lineage_of(mixed).newest_attempt()
    assert newest is not None and newest.number == 3
    (change,) = changes_of(mixed)
    assert dict(change.weights) == {"code": "6"}
    step, opened = change.position // BATCH, lineage_of(mixed).attempts()[1].start_step
    assert step == opened + HORIZON_STEPS < RELAYOUT
    reading = JobReading.of(load_job(mixed), None)
    mixture = reading.mixture([change])
    before, after = (np.array(mixture.counts(position)) for position in (change.position, STEPS * BATCH))
    assert np.abs(before - np.array([1 / 4, 3 / 4]) * step * BATCH).max() <= 1
    assert np.abs(after - before - np.array([6 / 9, 3 / 9]) * (STEPS - step) * BATCH).max() <= 2
    assert proof["epochs"] == pytest.approx(reading.epochs(mixture, STEPS * BATCH))


def test_mixture_replayed_from_its_job_file_and_journal_reads_the_same(
    mixed: Path, corpus: str, code: str, server: ForkServer, tmp_path: Path
) -> None:
    path = mixed_job(tmp_path / "again", corpus, code, steps=STEPS)
    assert run_here(path, server, "training.steps=2", "cluster.nproc=1").tally.step == 2
    (change,) = changes_of(mixed)
    lineage_of(path).append_journal(1, MIXTURE_KIND, change.position, {"weights": dict(change.weights)})
    again = run_here(path, server)
    assert again.outcome is not None and again.outcome.ok
    first, second = windows_read(mixed), windows_read(path)
    assert sorted(first) == list(range(STEPS * BATCH)) and first == second
    reading = JobReading.of(load_job(path), None)
    epochs = reading.epochs(reading.mixture([change]), STEPS * BATCH)
    assert again.of("progress")[-1].fields["epochs"] == pytest.approx(epochs) and 0 < epochs["code"] != epochs["web"]


def test_fork_that_changes_nothing_reads_on_as_its_origin_would_have(
    mixed: Path, corpus: str, code: str, tmp_path: Path
) -> None:
    path = mixed_job(tmp_path / "fork", corpus, code, steps=STEPS + 4)
    path.write_text(path.read_text().replace('name = "tiny"', 'name = "fork"'))
    job, origin_job = load_job(path), load_job(mixed)
    ref = lineage_of(mixed).checkpoints()[-1]
    prepared = prepare(job, 2, origin=Origin(origin_job, ref.attempt, ref.step))
    assert prepared.origin is not None and prepared.origin.position == STEPS * BATCH
    ours = JobReading.of(job, prepared.origin).mixture()
    theirs = JobReading.of(origin_job, None).mixture(changes_of(mixed))
    positions = np.arange(STEPS * BATCH, STEPS * BATCH + 20_000)
    assert all(np.array_equal(a, b) for a, b in zip(ours.place(positions), theirs.place(positions), strict=True))


def test_fork_with_other_weights_goes_on_with_each_source_where_it_stood(
    mixed: Path, corpus: str, code: str, tmp_path: Path
) -> None:
    path = mixed_job(tmp_path / "fork", corpus, code, steps=STEPS + 4)
    text = path.read_text().replace('name = "tiny"', 'name = "other"').replace("sources.code]", "sources.programs]")
    path.write_text(text.replace("weight = 3", "weight = 5"))
    job, ref = load_job(path), lineage_of(mixed).checkpoints()[-1]
    prepared = prepare(job, 2, origin=Origin(load_job(mixed), ref.attempt, ref.step))
    standing = JobReading.of(load_job(mixed), None).mixture(changes_of(mixed)).counts(STEPS * BATCH)
    ours = JobReading.of(job, prepared.origin).mixture()
    assert ours.counts(STEPS * BATCH) == standing and ours.weights_at(STEPS * BATCH) == (Fraction(1, 6), Fraction(5, 6))
    sources, windows = ours.place(np.arange(STEPS * BATCH, STEPS * BATCH + 60))
    assert [int(windows[sources == source].min()) for source in range(2)] == list(standing)


def test_run_whose_source_has_no_more_ends_there_and_said_so_before(
    corpus: str, code: str, server: ForkServer, tmp_path: Path
) -> None:
    path = mixed_job(tmp_path / "short", corpus, code, steps=STEPS, more='epochs = 0.1\nwhen_out = "stop"\n')
    job = load_job(path)
    reading = JobReading.of(job, None)
    last = reading.last_step(reading.mixture())
    assert last is not None and 2 < last < STEPS
    prepared = prepare(job, 2)
    assert any(f"the run ends after step {last} of {STEPS}" in each for each in prepared.warnings)
    run = run_here(path, server)
    assert run.outcome is not None and run.outcome.ok and run.tally.step == last
    assert_proven(path, last)
    again = run_here(path, server)
    assert again.outcome is not None and again.outcome.ok and again.tally.step == last


def test_sources_with_two_tokenizers_or_twice_the_same_data_are_refused(corpus: str, code: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    url = (other / "data").as_uri()
    text = write_corpus(other / "text", 30, seed=3)
    assert run_cli(["data", "prepare", text, "--out", url, "--vocab-size", "280", "--shard-tokens", "4096"]).code == 0
    with pytest.raises(PhalanxError, match=r"data\.sources\.web.*tokenizer"):
        prepare(load_job(mixed_job(tmp_path / "two", url, code)), 2)
    shutil.copytree(corpus.removeprefix("file://"), tmp_path / "copy")
    with pytest.raises(PhalanxError, match=r"data\.sources\.web.*other data than that of data\.sources\.code"):
        prepare(load_job(mixed_job(tmp_path / "twice", corpus, (tmp_path / "copy").as_uri())), 2)


def test_change_of_weights_by_the_command_line_counts_once_under_its_request_id(mixed: Path) -> None:
    told = run_cli(["data", "mix", mixed, "--set", "code=6", "--request-id", "once"])
    assert told.code == 0 and told.out.startswith("wish 1: code 6;"), told.err
    other = run_cli(["data", "mix", mixed, "--set", "code=7", "--request-id", "once"])
    assert other.code == 2 and '"code":"6"' in other.err and '"code":"7"' in other.err and not other.out
    late = run_cli(["data", "mix", mixed, "--set", "code=7"])
    assert late.code == 2 and f"done, at step {STEPS}" in late.err and not late.out
    assert len(Wishes(job_store(load_job(mixed))).all()) == 1


def test_change_of_weights_that_cannot_be_is_refused_in_one_line(mixed: Path) -> None:
    finished = run_cli(["data", "mix", mixed, "--set", "books=1"])
    assert finished.code == 2 and "one of the job's sources (code, web)" in finished.err, finished.err
    assert finished.err.count("\n") == 1 and "Traceback" not in finished.err
