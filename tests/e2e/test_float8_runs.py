"""Whole runs in fp8: they learn what a run in bfloat16 learns, and checkpoints go from one to the other and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.float8_reference import require_torchao
from support.jobs import losses_of, run_here, write_job

from phalanx.gang import ForkServer
from phalanx.lineage import Lineage
from phalanx.snapshot import load
from phalanx.spec import load_job
from phalanx.trainer.local import run_job
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import Origin, prepare

require_torchao()
pytestmark = pytest.mark.timeout(400)  # the run in bfloat16 counts to the first test

STEPS = 64
# Of the loss beside bfloat16's at each step, and of the mean of the last ten.
STEP_BOUND, END_BOUND = 0.02, 0.01


def _losses(folder: Path, corpus: str, server: ForkServer, recipe: str) -> NDArray[np.float64]:
    """Of a run of the demo's model, step by step."""
    path = write_job(folder, corpus, steps=STEPS, nproc=1)
    keys = ("model.preset=demo", "training.mixed_precision_param=bfloat16", f"training.float8_recipe={recipe}")
    more = (f"lr_scheduler.total_steps={STEPS}", f"checkpoint.interval={STEPS}", "parallel.local_batch_size=8")
    run = run_here(path, server, *keys, *more)
    assert run.outcome is not None and run.outcome.ok, run.events
    return np.array([loss for _, loss in sorted(losses_of(path).items())])


@pytest.fixture(scope="module")
def plain(corpus: str, server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> NDArray[np.float64]:
    """Losses in bfloat16."""
    return _losses(tmp_path_factory.mktemp("plain"), corpus, server, "none")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_run_in_fp8_learns_what_one_in_bfloat16_learns(
    corpus: str, server: ForkServer, tmp_path: Path, plain: NDArray[np.float64], recipe: str
) -> None:
    found = _losses(tmp_path, corpus, server, recipe)
    assert len(found) == len(plain) == STEPS and plain[-10:].mean() < 0.6 * plain[0], "the run learns"
    apart = np.abs(found - plain) / plain
    assert 0 < apart.max() < STEP_BOUND
    assert abs(found[-10:].mean() / plain[-10:].mean() - 1) < END_BOUND


def test_checkpoint_goes_from_bfloat16_to_fp8_and_back(corpus: str, server: ForkServer, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus, steps=2, nproc=1)
    plain = ("training.mixed_precision_param=bfloat16",)
    assert run_here(path, server, *plain).outcome.ok  # type: ignore[union-attr]
    origin = load_job(path, plain)
    forms = [_form(origin.job.storage, "tiny")]
    for name, steps, keys in (("narrow", 4, ("training.float8_recipe=tensorwise",)), ("wide", 6, ())):
        job = load_job(path, (*plain, f"job.name={name}", f"training.steps={steps}", *keys))
        newest = Lineage(job_store(origin)).checkpoints()[-1]
        outcome = run_job(prepare(job, 1, origin=Origin(origin, newest.attempt, newest.step)), server, lambda _: None)
        assert outcome.ok, outcome
        assert Lineage(job_store(job)).checkpoints()[-1].step == steps
        forms.append(_form(job.job.storage, name))
        origin = job
    assert forms[0] == forms[1] == forms[2]


def _form(storage: str, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of a job's newest checkpoint."""
    return {
        key: (str(tensor.dtype), tuple(tensor.shape))
        for key, tensor in load(f"{storage}/projects/default/jobs/{name}").items()
    }
