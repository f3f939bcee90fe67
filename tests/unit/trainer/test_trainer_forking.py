"""Forks between jobs of one split and of several: a source goes on where the origin's source of the same data stood."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.datasets import DIGEST, job_tables, write_dataset

from phalanx.core.digest import digest_of
from phalanx.core.errors import PhalanxError
from phalanx.lineage import ForkPoint, Lineage, LoaderState, Manifest, journal_digest
from phalanx.lineage.encoding import decode, encode
from phalanx.lineage.values import JobRecord
from phalanx.spec import Job, parse_job
from phalanx.trainer.forking import forked_mixture
from phalanx.trainer.mixing import JobReading, training_splits
from phalanx.trainer.places import job_store

STEP, BATCH = 7, 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(("code", "web", "books"), 1):
        write_dataset(f"file://{tmp_path}/{name}", seed=seed, held_out=False)
    return tmp_path


def make(folder: Path, name: str, train: str | None = None, **sources: float) -> Job:
    url = None if train is None else f"file://{folder}/{train}/train"
    named = {
        each.partition("_")[0]: {"url": f"file://{folder}/{each.rpartition('_')[2]}/train", "weight": weight}
        for each, weight in sources.items()
    }
    more: dict[str, Any] = {"data": {"sources": named}} if named else {}
    return parse_job(job_tables(f"file://{folder}/store", url, name, steps=50, more=more))


def trained(
    job: Job, *changes: tuple[int, dict[str, str]], origin: ForkPoint | None = None
) -> tuple[Lineage, Manifest]:
    """The job's lineage with a checkpoint at STEP."""
    lineage = Lineage(job_store(job))
    digests = {name: split.digest for name, split in training_splits(job).items()}
    lineage.create_job(
        request_id="r", spec={}, identity={"data_digests": digests}, identity_digest=DIGEST, origin=origin
    )
    if origin is not None:
        lineage.open_import(origin, code_digest=DIGEST, identity_digest=DIGEST)
        first = Manifest(
            1, origin.step, 1, DIGEST, digest_of({}), DIGEST, journal_digest(()),
            LoaderState(origin.step, origin.position), {}, (), (),
        )  # fmt: skip
        lineage.commit(first)
    attempt = lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={}).number
    for position, weights in changes:
        lineage.append_journal(attempt, "mixture", position, {"weights": weights})
    step, position = (STEP, STEP * BATCH) if origin is None else (STEP * 2, origin.position + STEP * BATCH)
    manifest = Manifest(
        attempt, step, 1, DIGEST, digest_of({}), DIGEST, journal_digest(()), LoaderState(step, position), {}, (), ()
    )
    lineage.commit(manifest)
    return lineage, manifest


def fork_point(job: Job, origin: Job, lineage: Lineage, at: Manifest) -> ForkPoint:
    mixture = forked_mixture(job, training_splits(job), origin, lineage, at)
    return ForkPoint("default", origin.job.name, at.attempt, at.step, at.loader.position, mixture)


def test_fork_of_one_split_from_one_split_knows_no_mixture(folder: Path) -> None:
    origin = make(folder, "origin", "web")
    point = fork_point(make(folder, "fork", "code"), origin, *trained(origin))
    assert point.mixture is None and "mixture" not in point.plain()
    assert JobReading.of(make(folder, "fork", "code"), point).mixture().counts(50) == (50,)


def test_fork_of_several_sources_from_one_split_goes_on_with_that_split(folder: Path) -> None:
    origin = make(folder, "origin", "web")
    fork = make(folder, "fork", web=1, code=1)
    point = fork_point(fork, origin, *trained(origin))
    assert point.mixture is not None and dict(point.mixture.windows) == {"code": 0, "web": STEP * BATCH}
    mixture = JobReading.of(fork, point).mixture()
    assert mixture.start == STEP * BATCH and mixture.counts(STEP * BATCH + 20) == (10, STEP * BATCH + 10)


def test_fork_of_one_split_from_several_goes_on_where_that_source_stood(folder: Path) -> None:
    origin = make(folder, "origin", web=3, code=1)
    fork = make(folder, "fork", "web")
    point = fork_point(fork, origin, *trained(origin))
    mixture = JobReading.of(fork, point).mixture()
    assert mixture.counts(STEP * BATCH) == (STEP * BATCH * 3 // 4,)
    sources, windows = mixture.place(np.arange(28, 33))
    assert not sources.any() and windows.tolist() == [21, 22, 23, 24, 25]


def test_fork_with_a_source_more_one_less_and_another_name_keeps_what_stays(folder: Path) -> None:
    origin = make(folder, "origin", web=3, code=1)
    fork = make(folder, "fork", internet_web=1, books=1)
    point = fork_point(fork, origin, *trained(origin))
    assert point.mixture is not None and dict(point.mixture.windows) == {"books": 0, "internet": 21}


def test_fork_of_a_fork_that_changes_nothing_reads_on_as_the_first_would_have(folder: Path) -> None:
    first = make(folder, "first", web=3, code=1)
    change = (16, {"code": "2/7"})
    lineage, at = trained(first, change)
    second = make(folder, "second", web=3, code=1)
    point = fork_point(second, first, lineage, at)
    third = make(folder, "third", web=3, code=1)
    last = fork_point(third, second, *trained(second, origin=point))
    theirs = JobReading.of(first, None).mixture(_changes(lineage, at))
    ours = JobReading.of(third, last).mixture()
    positions = np.arange(last.position, last.position + 9000)
    assert last.position == 2 * STEP * BATCH
    assert all(np.array_equal(a, b) for a, b in zip(ours.place(positions), theirs.place(positions), strict=True))
    assert ours.weights_at(last.position) == (Fraction(2, 23), Fraction(21, 23))


def _changes(lineage: Lineage, at: Manifest):
    from phalanx.lineage.plan import mixture_changes

    return mixture_changes(lineage.journal(at.attempt))


def test_job_that_was_forked_is_stored_and_read_with_its_mixture(folder: Path) -> None:
    origin = make(folder, "origin", web=3, code=1)
    point = fork_point(make(folder, "fork", web=3, code=1), origin, *trained(origin))
    record = JobRecord("r", {}, {}, DIGEST, point)
    assert decode(JobRecord, "job.json", encode(record)) == record
    lineage = Lineage(job_store(make(folder, "fork", web=3, code=1)))
    assert lineage.open_import(point, code_digest=DIGEST, identity_digest=DIGEST).placement == {"import": point.plain()}
    assert lineage.open_import(point, code_digest=DIGEST, identity_digest=DIGEST).number == 1


@pytest.mark.parametrize("what", ["digest", "held_out"])
def test_source_of_another_digest_or_held_out_is_refused_with_its_key(folder: Path, what: str) -> None:
    tables = job_tables(f"file://{folder}/store", None, "wrong")
    web = {"url": f"file://{folder}/web/train", "weight": 1}
    if what == "digest":
        web["digest"] = DIGEST
    else:
        write_dataset(f"file://{folder}/more", seed=9)
        web["url"] = f"file://{folder}/more/held_out"
    tables["data"]["sources"] = {"web": web, "code": {"url": f"file://{folder}/code/train", "weight": 1}}
    with pytest.raises(PhalanxError) as caught:
        training_splits(parse_job(tables))
    assert caught.value.where.startswith("data.sources.web")
