"""A fork end to end: ten steps, then another job from step 5 with another learning rate and the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.jobs import assert_proven, job_folder, lineage_of, losses_of, newest_tensors, run_here, write_job

from phalanx.core.errors import PhalanxError, Problems
from phalanx.gang import ForkServer
from phalanx.lineage import CheckpointRef
from phalanx.snapshot import load
from phalanx.spec import load_job
from phalanx.trainer.preflight import Origin, prepare

pytestmark = pytest.mark.distributed
OVERRIDES = ("checkpoint.interval=5", "training.steps=10")
FORK = (
    "job.name=second",
    "checkpoint.interval=4",
    "training.steps=12",
    "optimizer.lr=5e-4",
    "lr_scheduler.total_steps=20",
)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, corpus: str, server: ForkServer) -> Path:
    """A job that trained ten steps on two ranks."""
    path = write_job(tmp_path_factory.mktemp("first"), corpus)
    run = run_here(path, server, *OVERRIDES)
    assert run.outcome is not None and run.outcome.ok
    assert not run.of("step_time"), "only an agent asks for them"
    return path


def origin_of(path: Path, step: int = 5) -> Origin:
    return Origin(load_job(path, OVERRIDES), 1, step)


def test_fork_begins_with_the_weights_of_its_origin_and_proves_its_own_steps(first: Path, server: ForkServer) -> None:
    prepare(load_job(first, FORK), 2, origin=origin_of(first))
    lineage = lineage_of(first, *FORK)
    assert lineage.checkpoints() == (CheckpointRef(1, 5),)
    mine, theirs = (
        load((first.parent / f"store/projects/default/jobs/{name}").as_uri(), 5) for name in ("second", "tiny")
    )
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(mine[name].view(np.uint8), tensor.view(np.uint8), name)
    run = run_here(first, server, *FORK)
    assert run.outcome is not None and run.outcome.ok, run.outcome
    assert {event.fields["step"] for event in run.of("opened")} == {5}
    before, after = losses_of(first, *OVERRIDES), losses_of(first, *FORK)
    assert sorted(after) == list(range(6, 13)) and after[6] == before[6] and after[7] != before[7]
    assert_proven(first, 12, *FORK)
    assert lineage.checkpoints() == tuple(CheckpointRef(*ref) for ref in ((1, 5), (2, 8), (2, 12)))
    assert_proven(first, 10, *OVERRIDES)


def test_fork_with_another_batch_and_data_order_reads_on_from_where_its_origin_stood(
    first: Path, server: ForkServer
) -> None:
    changed = ("job.name=third", "training.global_batch_size=4", "training.seed=9", "training.steps=9", *OVERRIDES[:1])
    prepare(load_job(first, changed), 2, origin=origin_of(first))
    run = run_here(first, server, *changed)
    assert run.outcome is not None and run.outcome.ok, run.outcome
    lineage = lineage_of(first, *changed)
    manifest = lineage.manifest(lineage.checkpoints()[-1])
    assert (manifest.loader.step, manifest.loader.position) == (9, 5 * 8 + 4 * 4)
    proof = assert_proven(first, 9, *changed)
    assert (proof.origin_steps, proof.windows) == (5, 16)


def test_fork_into_other_shapes_is_refused_by_key_and_writes_nothing(first: Path) -> None:
    changed = ("job.name=wider", "model.args.dim=128")
    with pytest.raises(Problems, match=r"model\.args\.dim"):
        prepare(load_job(first, changed), 2, origin=origin_of(first))
    assert not (job_folder(first).parent / "wider").exists()


def test_fork_from_a_checkpoint_that_is_not_there_is_refused_by_name(first: Path) -> None:
    with pytest.raises(PhalanxError, match=r"attempt 1 step 7 of projects/default/jobs/tiny"):
        prepare(load_job(first, ["job.name=none"]), 2, origin=origin_of(first, 7))
    assert not (job_folder(first).parent / "none").exists()


def test_origin_is_not_needed_any_more_once_it_is_copied(first: Path) -> None:
    job = load_job(first, ["job.name=fourth"])
    prepare(job, 2, origin=origin_of(first))
    gone = Origin(load_job(first, [*OVERRIDES, f"job.storage={(first.parent / 'gone').as_uri()}"]), 1, 5)
    prepare(job, 2, origin=gone)
    assert newest_tensors(first).keys() == load((job_folder(first).parent / "fourth").as_uri()).keys()
