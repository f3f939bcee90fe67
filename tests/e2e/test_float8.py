"""Whole runs in fp8: checkpoints go from bfloat16 to fp8 and back."""

from __future__ import annotations

from pathlib import Path

from support.float8_reference import require_torchao
from support.jobs import run_here, write_job

from phalanx.gang import ForkServer
from phalanx.lineage import Lineage
from phalanx.snapshot import load
from phalanx.spec import load_job
from phalanx.trainer.local import run_job
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import Origin, prepare

require_torchao()


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
