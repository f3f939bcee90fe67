"""`--partial NAME`: which tensors a restore may leave out, each spelt out."""

from __future__ import annotations

import pytest

from phalanx.cli.config import with_partial
from phalanx.spec import parse_job
from phalanx.spec.source import apply_overrides
from phalanx.trainer.session import left_out_names

TABLES = {
    "job": {"name": "a", "storage": "file:///nowhere"},
    "model": {"preset": "tiny"},
    "data": {"train": "file:///nowhere/train"},
    "training": {"seq_len": 32, "steps": 100, "global_batch_size": 8},
    "optimizer": {"lr": 1e-3},
}


@pytest.mark.parametrize("names", [[], ["model.new.weight"], ["model.new.weight", "optim.new.weight.exp_avg"]])
def test_partial_names_reach_the_restore_as_they_were_given(names: list[str]) -> None:
    """Case 5."""
    overrides = with_partial(["training.steps=7"], names)
    job = parse_job(apply_overrides(TABLES, overrides))
    assert left_out_names(job) == tuple(names) and job.training.steps == 7


def test_partial_is_nothing_unless_it_is_asked_for() -> None:
    assert with_partial(None, None) == [] and left_out_names(parse_job(TABLES)) == ()
