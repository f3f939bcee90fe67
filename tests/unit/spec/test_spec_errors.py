from __future__ import annotations

import datetime
import os

import pytest
from spec_samples import SMALL, tables

from phalanx.core.errors import PhalanxError, Problems
from phalanx.spec import load_job, parse_job
from phalanx.spec.toml import toml_text


def problems_of(raw, world_size=None):
    with pytest.raises(Problems) as caught:
        parse_job(raw, world_size)
    assert all("\n" not in str(problem) for problem in caught.value.problems)
    assert str(caught.value).count("\n") == len(caught.value.problems) - 1
    return {problem.where: problem for problem in caught.value.problems}


@pytest.mark.parametrize(
    "changes, key, text",
    [
        ({"training__steps": 0}, "training.steps", "a number above 0"),
        ({"training__steps": 1.5}, "training.steps", "a whole number"),
        ({"training__steps": True}, "training.steps", "a whole number"),
        ({"training__steps": "40"}, "training.steps", "a whole number"),
        ({"training__steps": None}, "training.steps", "set it in [training]"),
        ({"optimizer__lr": float("nan")}, "optimizer.lr", "a finite number"),
        ({"optimizer__lr": -1.0}, "optimizer.lr", "a number above 0"),
        ({"optimizer__beta2": 1.0}, "optimizer.beta2", "a number below 1"),
        ({"compile__enable": "yes"}, "compile.enable", "true or false"),
        ({"job__name": "No Spaces"}, "job.name", "lower-case letters"),
        ({"job__storage": "/srv/runs"}, "job.storage", "file:///absolute/folder"),
        ({"data__train": "file://relative"}, "data.train", "file:///absolute/folder"),
        ({"data__train_digest": "sha256:12"}, "data.train_digest", "64 hexadecimal digits"),
        (
            {"training__mixed_precision_param": "fp8"},
            "training.mixed_precision_param",
            "'bfloat16', 'float16' or 'float32'",
        ),
        ({"parallel__zero": 4}, "parallel.zero", "1, 2 or 3"),
        ({"parallel__schedule": "pipedream"}, "parallel.schedule", "'interleaved_zero_bubble'"),
        ({"parallel__stage_split": "1,,2"}, "parallel.stage_split", "cost, even, or layers of each stage as 9,9,8,6"),
        ({"parallel__stage_split": "4,0"}, "parallel.stage_split", "cost, even, or layers of each stage as 9,9,8,6"),
        ({"checkpoint__interval": 0}, "checkpoint.interval", "a number above 0"),
        ({"validation__freq": -1}, "validation.freq", "a number at least 0"),
        ({"training__steps": 10**23}, "training.steps", "a number at most 99,999,999"),
        ({"training__seed": 2**63}, "training.seed", "a number at most 9,223,372,036,854,775,807"),
        ({"cluster__nproc": 2**32}, "cluster.nproc", "a number at most 1,048,576"),
        ({"deadlines__step_s": 1e300}, "deadlines.step_s", "a number at most 100,000,000"),
        ({"deadlines__step_s": 0}, "deadlines.step_s", "a number above 0"),
        ({"model__preset": "llama4"}, "model.preset", "llama3-8b"),
        ({"model__class": "my.module.Class"}, "model.class", "package.module:Class"),
        ({"training": 3}, "training", "a table"),
        ({"metrics__folder": ""}, "metrics.folder", "is '': expected text that is not empty; change it: Local folder"),
        ({"metrics__folder": "/srv/\0"}, "metrics.folder", "without null characters, which no path"),
        ({"job__storage": "file:///srv/\0"}, "job.storage", "without null characters, which no path"),
        ({"code__path": "\0"}, "code.path", "without null characters, which no path"),
        ({"storage__b__endpoint": "localhost:9000"}, "storage.b.endpoint", "https://host:port"),
    ],
)
def test_wrong_value_is_one_line_with_key_expectation_and_remedy(changes, key, text):
    found = problems_of(tables(**changes))
    assert text in str(found[key])
    assert found[key].remedy
    assert len(found) == 1


@pytest.mark.parametrize(
    "changes, key, meant",
    [
        ({"training__stepz": 3}, "training.stepz", "training.steps"),
        ({"trainng__steps": 3}, "trainng.steps", "training.steps"),
        ({"model__args": {"n_head": 4}}, "model.args.n_head", "model.args.n_heads"),
        ({"model__args": {"hidden-size": 64}}, "model.args.hidden-size", "model.args.dim"),
        ({"num-layers": 4}, "num-layers", "model.args.n_layers"),
        ({"tensor-model-parallel-size": 2}, "tensor-model-parallel-size", "parallel.tp"),
        ({"parallel__pipeline-model-parallel-size": 2}, "parallel.pipeline-model-parallel-size", "parallel.pp"),
        ({"micro-batch-size": 2}, "micro-batch-size", "parallel.local_batch_size"),
        ({"global-batch-size": 2}, "global-batch-size", "training.global_batch_size"),
        ({"train-iters": 2}, "train-iters", "training.steps"),
        ({"parallelism__tensor_parallel_degree": 2}, "parallelism.tensor_parallel_degree", "parallel.tp"),
        ({"training__local_batch_size": 2}, "training.local_batch_size", "parallel.local_batch_size"),
        ({"training__dataset_path": "x"}, "training.dataset_path", "data.train"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size", "parallel.local_batch_size"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage", "parallel.zero"),
        ({"trainer__gradient_clip_val": 1.0}, "trainer.gradient_clip_val", "training.max_norm"),
        ({"model__flavor": "8B"}, "model.flavor", "model.preset"),
        ({"storage__b__regoin": "x"}, "storage.b.regoin", "storage.b.region"),
        ({"storage__b__endpoint_url": "x"}, "storage.b.endpoint_url", "storage.b.endpoint"),
    ],
)
def test_unknown_key_is_answered_with_the_right_name(changes, key, meant):
    found = problems_of(tables(**changes))
    assert list(found) == [key]
    assert found[key].remedy == f"did you mean {meant}?"


@pytest.mark.parametrize(
    "changes, key, text",
    [
        ({"experimental__custom_import": "x"}, "experimental.custom_import", "model.class"),
        ({"experimental": {}}, "experimental", "model.class"),
        ({"trainer__accumulate_grad_batches": 4}, "trainer.accumulate_grad_batches", "training.global_batch_size"),
        ({"parallel__zzzzqqq": 4}, "parallel.zzzzqqq", "docs/job-file.md"),
    ],
)
def test_unknown_key_without_equivalent_says_what_to_do(changes, key, text):
    found = problems_of(tables(**changes))
    assert text in next(problem.remedy for where, problem in found.items() if where.startswith(key.partition(".")[0]))


def test_every_mistake_is_told_at_once_also_rules_over_several_keys():
    raw = tables(
        training__steps="many",
        optimizer__lr=None,
        optimizer__learning_rate=1e-3,
        training__seq_len=100,
        parallel__tp=3,
        parallel__pp=2,
        parallel__zero=2,
        compile__enabled=True,
    )
    found = problems_of(raw, world_size=8)
    assert {
        "training.steps",
        "optimizer.learning_rate",
        "compile.enabled",
        "parallel",
        "parallel.tp",
        "training.seq_len",
        "parallel.zero",
    } == set(found)
    assert "optimizer.lr" not in found, "the misspelt key is the whole story"


def test_rule_is_not_applied_to_a_default_that_stands_for_a_misspelt_key():
    found = problems_of(tables(parallel__tpp=2, parallel__dp_shard=4), world_size=8)
    assert set(found) == {"parallel.tpp"}


def test_file_missing_or_unusable_is_one_line(tmp_path):
    with pytest.raises(PhalanxError, match="no such file"):
        load_job(tmp_path / "job.toml")
    with pytest.raises(PhalanxError, match="not a directory"):
        load_job(tmp_path)
    with pytest.raises(PhalanxError, match="a readable job file"):
        load_job("/proc/self/mem")
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"[job]\nname = '\xff'\n")
    with pytest.raises(PhalanxError, match=r"UTF-8 text.*line 2"):
        load_job(bad)
    bad.write_text("[job]\nname = nope\n")
    with pytest.raises(PhalanxError, match=r"TOML; .*line 2, column 8"):
        load_job(bad)
    bad.write_text("[job]\nname = [1,\n")
    with pytest.raises(PhalanxError, match=r"line 3, column 1"):
        load_job(bad)


def test_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf" + toml_text(SMALL).encode())
    assert load_job(path).job.name == "sample"
    path.write_bytes(b"\xef\xbb\xbf[job]\nname = nope\n")
    with pytest.raises(PhalanxError, match="line 2, column 8"):
        load_job(path)


@pytest.mark.timeout(20)
def test_file_that_is_a_pipe_or_device_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "job.toml")
    for path in (tmp_path / "job.toml", "/dev/zero"):
        with pytest.raises(PhalanxError, match="not a pipe or device"):
            load_job(path)


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 20_000 + "]" * 20_000,
        "x = " + "{y = " * 150 + "1" + "}" * 150,
        "x = " + "[" * 101 + "]" * 101,
        "a" + ".a" * 500 + " = 1",
        "[a" + ".a" * 500 + "]",
    ],
)
def test_file_nested_too_deep_is_one_line(tmp_path, text):
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(PhalanxError, match="more than 100 levels") as error:
        load_job(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("override", ["model.args.x=" + "[" * 20_000, "a" + ".a" * 500 + "=1"])
def test_override_nested_too_deep_is_one_line(tmp_path, override):
    path = tmp_path / "job.toml"
    path.write_text(toml_text(SMALL))
    with pytest.raises(PhalanxError, match=r"--set.*more than 100 levels") as error:
        load_job(path, [override])
    assert "\n" not in str(error.value)


def test_file_nested_as_deep_as_allowed_is_checked_key_by_key(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("x = " + "[" * 99 + "]" * 99)
    with pytest.raises(Problems, match="x is"):
        load_job(path)


def test_empty_file_names_what_must_be_given():
    found = problems_of({})
    assert {"job.name", "job.storage", "data.train", "training.steps", "optimizer.lr", "model.args.dim"} <= set(found)
    assert "preset" in found["model.args.dim"].remedy


def test_preset_and_class_of_own_values_are_checked():
    found = problems_of(tables(model={"class": "a:B", "args": {"when": datetime.date(2026, 1, 1)}}))
    assert "as text" in found["model.args"].remedy
