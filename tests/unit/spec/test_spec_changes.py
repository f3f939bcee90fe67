from __future__ import annotations

import pytest
from spec_samples import sample, tables

from phalanx.core.errors import Problems
from phalanx.spec import all_keys, parse_job
from phalanx.spec.changes import When, changes, require_forkable, require_resumable, when


def refused(require, before, after) -> dict[str, str]:
    with pytest.raises(Problems) as error:
        require(before, after)
    return {problem.where: str(problem) for problem in error.value.problems}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("job.name", When.NAME),
        ("job.storage", When.NAME),
        ("model.preset", When.RESUME),
        ("model.args.dim", When.NEVER),
        ("model.args.rope_theta", When.FORK),
        ("data.train", When.RESUME),
        ("training.global_batch_size", When.JOURNAL),
        ("training.seed", When.FORK),
        ("optimizer.lr", When.FORK),
        ("optimizer.name", When.NEVER),
        ("lr_scheduler.total_steps", When.FORK),
        ("parallel.tp", When.RESUME),
        ("recovery.on_spike", When.RESUME),
    ],
)
def test_key_may_change_on_its_occasion(name, expected):
    (key,) = [key for key in all_keys() if key.name == name]
    assert when(key) is expected


def test_every_key_has_its_occasion():
    assert {when(key) for key in all_keys()} == set(When)


def test_same_job_has_no_changes_and_defaults_written_out_are_none():
    assert changes(sample(), sample(optimizer__beta1=0.9)) == ()
    require_resumable(sample(), sample())


def test_resume_takes_placement_and_free_keys():
    given = {
        "parallel": {"tp": 2, "zero": 1},
        "training__steps": 80,
        "lr_scheduler__total_steps": 40,
        "recovery__on_spike": "roll_back",
        "storage": {"corpus": {"region": "here"}},
        "data__train_digest": "sha256:" + "ab" * 32,
    }
    found = changes(sample(), sample(**given))
    assert {"parallel.tp", "parallel.zero", "training.steps", "storage.corpus.region"} < {each.key for each in found}
    assert {each.when for each in found} == {When.RESUME}
    require_resumable(sample(), sample(**given))


def test_resume_names_every_key_that_makes_another_run():
    after = sample(optimizer__lr=2e-3, training__global_batch_size=32, job__name="other", parallel__tp=2)
    found = refused(require_resumable, sample(), after)
    assert set(found) == {"optimizer.lr", "training.global_batch_size", "job.name"}
    assert found["optimizer.lr"] == (
        "optimizer.lr is 0.002: expected the value with which the job was created: 0.001; fork the job"
    )
    assert "another job" in found["job.name"]


def test_more_steps_without_a_fixed_schedule_are_another_run():
    assert set(refused(require_resumable, sample(), sample(training__steps=80))) == {"lr_scheduler.total_steps"}


def test_schedule_key_without_effect_may_change():
    before, after = (sample(lr_scheduler={"decay_type": "none", "min_lr_factor": floor}) for floor in (0.1, 0.2))
    require_resumable(before, after)


def test_fork_takes_whatever_keeps_shapes():
    after = sample(
        job__name="other",
        optimizer={"lr": 1e-4, "beta2": 0.99},
        data__train="s3://other/train",
        training={"seq_len": 64, "steps": 60, "global_batch_size": 32, "seed": 7, "mixed_precision_param": "float32"},
        lr_scheduler__decay_type="linear",
        model__args={"norm_eps": 1e-6},
        parallel__tp=2,
    )
    require_forkable(sample(), after)


def test_fork_names_every_key_that_shapes_tensors():
    after = sample(model__args={"n_layers": 5, "vocab_size": 8192}, optimizer__lr=1e-4)
    found = refused(require_forkable, sample(), after)
    assert set(found) == {"model.args.n_layers", "model.args.vocab_size"}
    assert "model.args.n_layers is 5: expected the value of the job it is forked from" in found["model.args.n_layers"]


def test_fork_may_scale_the_positions_of_a_model_and_resume_may_not():
    before, after = (sample(model={"preset": preset}) for preset in ("llama3-8b", "llama3.1-8b"))
    require_forkable(before, after)
    require_forkable(after, before)
    found = refused(require_resumable, before, after)
    assert {name.removesuffix(name.rpartition(".")[2]) for name in found} == {"model.args.rope_scaling."}


def test_fork_keeps_the_users_class_and_its_arguments():
    own = {"class": "my.models:Tiny", "args": {"width": 3, "nested": {"a": 1}}}
    before = parse_job(tables(model=own))
    require_forkable(before, parse_job(tables(model=own, job__name="other", optimizer__lr=1e-4)))
    other = {"class": "my.models:Tiny", "args": {"width": 4, "nested": {"a": 2}}}
    found = refused(require_forkable, before, parse_job(tables(model=other)))
    assert set(found) == {"model.args.width", "model.args.nested.a"}
    assert "model.class" in refused(require_forkable, before, sample())
