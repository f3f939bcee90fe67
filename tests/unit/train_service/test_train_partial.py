"""`checkpoint.partial` of a fork or a resume, against a checkpoint that a writer made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.box import HeldTensor, whole
from phalanx.core.errors import PhalanxError, Problems
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest
from phalanx.objects import ObjectStore, open_store
from phalanx.objects.faults import FaultyStore
from phalanx.snapshot import commit
from phalanx.snapshot.writer import Writer
from phalanx.spec import Job, parse_job
from phalanx.train.partial import require_known

DIGEST = "sha256:" + "0" * 64
STORED = ("model.norm.weight", "model.head.weight", "optim.norm.weight.exp_avg", "optim.norm.weight.exp_avg_sq")
OWN = {"class": "mine:Model", "args": {"vocab_size": 256}}


def job(partial: str = "", model: dict[str, Any] | None = None, **sections: Any) -> Job:
    return parse_job(
        {
            "job": {"name": "a", "storage": "file:///nowhere"},
            "model": model or {"preset": "tiny"},
            "data": {"train": "file:///nowhere/train"},
            "training": {"seq_len": 32, "steps": 100, "global_batch_size": 8},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"partial": partial},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    made = open_store(tmp_path_factory.mktemp("job").as_uri())
    attempt = Lineage(made).open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={}).number
    tensors = [HeldTensor(name, (3,), whole((3,)), torch.ones(3)) for name in STORED]
    written = Writer(made, 0, 1).save(attempt, 7, tensors).wait(30)
    draft = Manifest(attempt, 7, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(7, 56), {}, (), ())
    commit(Lineage(made), made, draft, 1, 30, expected={0: written})
    return made


REF = CheckpointRef(1, 7)


@pytest.mark.parametrize("partial", [*STORED, " , ".join(STORED)])
def test_tensors_of_the_checkpoint_are_taken(store: ObjectStore, partial: str) -> None:
    require_known(job(), job(partial), store, REF)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("model.nrom.weight", "model.norm.weight"),
        ("norm.weight", "model.norm.weight"),
        ("optim.norm.weight.exp_av", "optim.norm.weight.exp_avg"),
        ("model.norm", "model.norm.weight"),
        ("model.*", "model."),
    ],
)
def test_name_of_nothing_is_told_with_the_nearest(store: ObjectStore, name: str, nearest: str) -> None:
    with pytest.raises(Problems) as caught:
        require_known(job(), job(f"{STORED[0]},{name}"), store, REF)
    (line,) = str(caught.value).splitlines()
    said = f"checkpoint.partial is {name!r}: expected a tensor of the job, or of its checkpoint of {REF}, such as "
    assert line.startswith(f"{said}{nearest}")
    assert line.endswith("; correct the name; `phalanx checkpoint show JOB STEP` lists them")


def test_every_name_of_nothing_has_its_line(store: ObjectStore) -> None:
    with pytest.raises(PhalanxError) as caught:
        require_known(job(), job("first,model.norm.weight,zzz"), store, REF)
    lines = str(caught.value).splitlines()
    assert [line.split("'")[1] for line in lines] == ["first", "zzz"]
    assert "such as" not in lines[1], "nothing is near it"


def test_state_of_another_optimizer_is_a_tensor_of_the_new_job(store: ObjectStore) -> None:
    """A preset's parameters stay as they are; their moments may be others."""
    name = "optim.norm.weight.momentum"
    with pytest.raises(PhalanxError, match=name):
        require_known(job(), job(name), store, REF)
    muon = {"optimizer": {"lr": 1e-3, "name": "muon"}}
    require_known(job(), job(name, **muon), store, REF)
    for other in ("optim.nrom.weight.momentum", "model.norm.bias", "optim"):
        with pytest.raises(PhalanxError, match=other):
            require_known(job(), job(other, **muon), store, REF)


def test_class_of_the_users_own_may_have_any_tensor_of_a_model(store: ObjectStore) -> None:
    before = job(model=OWN)
    require_known(before, job("model.new.weight, optim.new.weight.exp_avg", model=OWN), store, REF)
    for name in ("nosuchtensor", "new.weight", "model", "model."):
        with pytest.raises(PhalanxError, match=f"is '{name}'"):
            require_known(before, job(name, model=OWN), store, REF)


def test_nothing_is_read_where_no_name_is_given(tmp_path: Path) -> None:
    watched = FaultyStore(open_store(tmp_path.as_uri()))
    require_known(job(), job(" , "), watched, REF)
    assert watched.calls == []
