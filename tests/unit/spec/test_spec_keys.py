from __future__ import annotations

import re

import pytest
from pydantic import ValidationError
from spec_samples import sample, tables

from phalanx.core.errors import Problems
from phalanx.spec import Mark, all_keys, parse_job
from phalanx.spec.foreign import NO_EQUIVALENT, SAME_MEANING
from phalanx.spec.job import Job
from phalanx.spec.keys import Section, describe, key, mark_of, walk_fields, walk_sections


@pytest.mark.parametrize("name, field", list(walk_fields(Job)))
def test_key_of_the_job_file_carries_one_mark_and_one_sentence(name, field):
    mark_of(field)
    info = describe(name, field)
    assert re.fullmatch(r"[A-Z].*\.", info.description), f"{name}: a sentence is missing"
    assert info.type_text and "table" not in info.type_text
    assert info.default or field.is_required(), f"{name}: neither required nor with a documented default"


def test_key_without_mark_is_found_by_the_walk():
    class Careless(Section):
        marked: int = key(Mark.FREE, "Fine.", 1)
        unmarked: int = 3

    (_, marked), (name, unmarked) = walk_fields(Careless)
    assert mark_of(marked) is Mark.FREE and name == "unmarked"
    with pytest.raises((AssertionError, KeyError)):
        mark_of(unmarked)
    assert describe(name, unmarked).description == ""


def test_numbers_with_a_dimension_carry_a_unit():
    unitless = {
        "model.args.norm_eps",
        "model.args.rope_theta",
        "model.args.dropout",
        "model.args.moe.route_scale",
        "model.args.moe.aux_loss",
        "model.args.moe.bias_update_rate",
        "model.args.rope_scaling.factor",
        "model.args.rope_scaling.low_freq_factor",
        "model.args.rope_scaling.high_freq_factor",
        "model.args.rope_scaling.beta_fast",
        "model.args.rope_scaling.beta_slow",
        "model.args.rope_scaling.attention_factor",
        "model.args.rope_scaling.mscale",
        "model.args.rope_scaling.mscale_all_dim",
        "training.seed",
        "training.max_norm",
        "training.loss_scale_init",
        "training.loss_scale_growth",
        "training.loss_scale_backoff",
        "optimizer.lr",
        "optimizer.beta1",
        "optimizer.momentum",
        "optimizer.ns_steps",
        "optimizer.beta2",
        "optimizer.eps",
        "optimizer.weight_decay",
        "lr_scheduler.min_lr_factor",
        "lr_scheduler.decay_ratio",
        "local_updates.outer_lr",
        "local_updates.outer_momentum",
        "loss.z_loss",
        "parallel.zero",
        "recovery.bad_shard_budget",
        "cluster.network.ib_gid_index",
        "cluster.network.ib_roce_version",
        "cluster.network.ib_traffic_class",
        "cluster.network.ib_control_traffic_class",
        "cluster.network.ib_service_level",
        "cluster.network.ib_partition_index",
        "cluster.network.ib_timeout",
        "cluster.network.ib_retry_count",
        "cluster.network.ib_queue_pairs",
    }
    numbers = {each.name: each.unit for each in all_keys() if re.match(r"integer|number|1 or", each.type_text)}
    assert {name for name, unit in numbers.items() if not unit} == unitless


def test_sections_are_all_described_and_walked():
    names = [name for name, section in walk_sections(Job) if section.__doc__]
    assert names[:4] == ["job", "model", "model.args", "model.args.moe"] and names[-1] == "storage.NAME"
    assert {each.section for each in all_keys()} == set(names)


def test_marks_match_what_the_design_promises():
    marks = {each.name: each.mark for each in all_keys()}
    by_mark = {mark: {name for name, found in marks.items() if found == mark} for mark in Mark}
    assert by_mark[Mark.JOURNALED] == {
        "training.global_batch_size",
        "data.sources.NAME.weight",
        "data.mixture.NAME.from_step",
        "data.mixture.NAME.weights",
    }
    assert {name.partition(".")[0] for name in by_mark[Mark.PLACEMENT]} == {
        "parallel",
        "cluster",
        "code",
    }
    assert {name.partition(".")[0] for name in by_mark[Mark.IDENTITY]} == {
        "model",
        "data",
        "training",
        "loss",
        "optimizer",
        "lr_scheduler",
        "local_updates",
        "gradient_compression",
    }
    assert all(marks[name] == Mark.FREE for name in ("training.steps", "compile.enable", "activation_checkpoint.mode"))


def test_names_of_other_systems_lead_to_keys_that_exist():
    known = {each.name for each in all_keys()}
    assert set(SAME_MEANING.values()) <= known
    assert not set(SAME_MEANING) & known and not set(SAME_MEANING) & set(NO_EQUIVALENT)


def test_job_is_frozen_and_closed():
    job = sample()
    with pytest.raises(ValidationError):
        job.training.steps = 3  # type: ignore[misc]


def test_defaults_are_those_of_the_contract():
    job = sample()
    assert job.job.project == "default" and job.model.decoder.dim == 128 and job.model.decoder.n_kv_heads == 2
    assert (job.parallel.zero, job.parallel.schedule, job.parallel.stages_per_rank, job.parallel.dp_shard) == (
        3,
        "1f1b",
        1,
        -1,
    )
    assert job.lr_scheduler.total_steps == 40 and job.recovery.max_attempts_without_progress == 3
    assert job.deadlines.model_dump() == {
        "init_s": 120,
        "restore_s": 600,
        "first_step_s": 300,
        "step_s": 120,
        "save_s": 600,
        "evaluation_s": 600,
        "plan_s": 3600,
        "stop_grace_s": None,
    }
    assert job.recovery.model_dump() == {
        "max_attempts_without_progress": 3,
        "on_nan": "skip",
        "on_spike": "notify",
        "on_divergence": "notify",
        "on_hang": "restart",
        "on_bad_shard": "stop",
        "bad_shard_budget": 0.001,
    }
    assert (job.checkpoint.keep_latest_k, job.checkpoint.keep_every_n) == (0, 0)
    assert job.deadlines.grace_s == 720 and sample(deadlines__stop_grace_s=5.0).deadlines.grace_s == 5


@pytest.mark.parametrize("schedule, stages", [("gpipe", 1), ("interleaved_1f1b", 2), ("zbv", 2), ("dualpipev", 2)])
def test_stages_per_rank_left_out_follows_the_schedule(schedule, stages):
    assert sample(parallel__schedule=schedule).parallel.stages_per_rank == stages


def test_heads_without_kv_heads_are_full_and_preset_keys_can_be_overridden():
    job = parse_job(tables(model={"args": {"dim": 64, "n_layers": 2, "n_heads": 4, "ffn_dim": 128, "vocab_size": 256}}))
    assert job.model.decoder.n_kv_heads == 4
    assert sample(model__args={"n_layers": 8}).model.decoder.n_layers == 8
    moe = parse_job(tables(model={"preset": "mixtral-8x7b", "args": {"moe": {"top_k": 1}}})).model.decoder.moe
    assert moe is not None and (moe.top_k, moe.num_experts) == (1, 8)


def test_own_class_keeps_its_arguments_free_but_writable_as_json():
    job = parse_job(tables(model={"class": "my.models:Tiny", "args": {"width": 3, "nested": {"a": [1, 2.5, "x"]}}}))
    assert job.model.class_ == "my.models:Tiny" and job.model.args == {"width": 3, "nested": {"a": [1, 2.5, "x"]}}
    assert job.identity()["model"] == {"class": "my.models:Tiny", "args": job.model.args}


def test_storage_settings_go_by_bucket_then_default():
    job = sample(storage={"corpus": {"region": "here"}, "default": {"region": "there"}})
    assert job.storage_settings("s3://corpus/train").region == "here"
    assert job.storage_settings("s3://other/x").region == "there"
    assert sample().storage_settings("s3://other").region is None


def test_numbers_with_a_unit_have_a_bound_above():
    numbers = [each for each in all_keys() if re.match(r"integer|number ", each.type_text)]
    unbounded = {each.name for each in numbers if each.unit and "<" not in each.type_text}
    assert unbounded == set()
    integers = [each for each in numbers if each.type_text.startswith("integer")]
    assert {each.name for each in integers if "<" not in each.type_text} == set()


def test_tokens_of_a_whole_run_fit_what_counts_them():
    with pytest.raises(Problems, match=r"training\.steps.*at most 9,223,372,036,854,775,807 tokens in all"):
        sample(training__seq_len=2**31 - 1, training__global_batch_size=2**24, training__steps=99_999_999)
