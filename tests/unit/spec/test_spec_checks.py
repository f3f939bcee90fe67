from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import sample, tables

from phalanx.core.errors import Problems
from phalanx.spec import Layout, Parallel, parse_job
from phalanx.spec.checks import resolve_axes
from phalanx.spec.effects import without_effect

MOE = {"num_experts": 8, "top_k": 2, "expert_ffn_dim": 128}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
EXPERTS = {"args": {"dim": 64, "n_layers": 4, "n_heads": 4, "vocab_size": 512, "moe": MOE}}


@pytest.mark.parametrize(
    "changes, world, key, text",
    [
        ({"parallel__tp": 2, "parallel__dp_shard": 2}, 8, "parallel", "multiply to the 8 ranks, not to 4"),
        ({"parallel__tp": 4, "model__args": {"n_kv_heads": 4}}, 6, "parallel", "divides the 6 ranks"),
        ({"parallel__tp": -1}, 8, "parallel.tp", "at most one axis with -1"),
        ({"parallel__cp": 0}, 8, "parallel.cp", "at least 1, or -1"),
        (
            {"parallel__tp": 2, "model__args": {"n_heads": 6, "n_kv_heads": 3, "head_dim": 32}},
            2,
            "parallel.tp",
            "a divisor of model.args.n_kv_heads = 3, or a multiple",
        ),
        (
            {"parallel__tp": 3, "model__args": {"n_heads": 4, "n_kv_heads": 4}},
            3,
            "parallel.tp",
            "a divisor of model.args.n_heads = 4",
        ),
        ({"parallel__tp": 2, "model__args": {"vocab_size": 4097}}, 2, "parallel.tp", "model.args.vocab_size = 4097"),
        ({"parallel__tp": 2, "model__args": {"ffn_dim": 383}}, 2, "parallel.tp", "model.args.ffn_dim = 383"),
        (
            {"training__seq_len": 126, "parallel__tp": 2, "parallel__cp": 2},
            4,
            "training.seq_len",
            "a multiple of tp x cp = 4",
        ),
        ({"training__seq_len": 126, "parallel__cp": 2}, 2, "training.seq_len", "a multiple of 2 x cp = 4"),
        (
            {"training__seq_len": 132, "parallel__cp": 2, "parallel__tp": 4},
            8,
            "training.seq_len",
            "a multiple of tp x cp = 8",
        ),
        (
            {"parallel__cp": 3, "training__seq_len": 126, "parallel__cp_comm_type": "a2a"},
            3,
            "parallel.cp",
            "n_heads / tp = 4",
        ),
        (
            {
                "parallel__cp": 4,
                "parallel__cp_comm_type": "a2a",
                "model__args": {"n_heads": 12, "n_kv_heads": 6, "head_dim": 8},
            },
            4,
            "parallel.cp",
            "a multiple of the 6 heads of keys and values",
        ),
        (
            {"optimizer": {"name": "muon", "class": "mine:Own"}},
            None,
            "optimizer.name",
            "nothing beside optimizer.class",
        ),
        ({"optimizer__name": "muon", "model": EXPERTS}, None, "optimizer.name", "adamw with experts"),
        (
            {"optimizer__name": "muon", "local_updates__steps": 4, "parallel__dp_replicate": 2},
            2,
            "optimizer.name",
            "adamw beside local_updates",
        ),
        (
            {
                "optimizer__name": "muon",
                "gradient_compression": {"method": "powersgd"},
                "parallel": {"dp_replicate": 2},
            },
            2,
            "optimizer.name",
            "adamw beside gradient_compression",
        ),
        (
            {"training__mixed_precision_param": "float16", "model": EXPERTS},
            None,
            "training.mixed_precision_param",
            "bfloat16 or float32 with experts",
        ),
        (
            {
                "training__mixed_precision_param": "float16",
                "local_updates__steps": 4,
                "parallel__dp_replicate": 2,
            },
            2,
            "training.mixed_precision_param",
            "bfloat16 or float32 beside local_updates",
        ),
        (
            {
                "training__mixed_precision_param": "float16",
                "gradient_compression": {"method": "powersgd"},
                "parallel": {"dp_replicate": 2},
            },
            2,
            "training.mixed_precision_param",
            "bfloat16 or float32 beside gradient_compression",
        ),
        ({"loss": {"fn": "mine:loss", "z_loss": 1e-4}}, None, "loss.z_loss", "0 beside loss.fn"),
        ({"loss": {"fn": "mine:loss", "chunk_tokens": 8}}, None, "loss.chunk_tokens", "0 beside loss.fn"),
        (
            {"activation_checkpoint": {"mode": "selective"}, "compile__enable": True},
            None,
            "activation_checkpoint.mode",
            "none or full with compile.enable",
        ),
        (
            {
                "activation_checkpoint": {"mode": "selective"},
                "parallel": {"pp": 2, "schedule": "zbv", "zero": 1},
            },
            2,
            "activation_checkpoint.mode",
            "none or full with the schedule zbv",
        ),
        (
            {"compile__enable": True, "parallel": {"pp": 2, "schedule": "dualpipev", "zero": 1}},
            2,
            "compile.enable",
            "false with the schedule dualpipev",
        ),
        ({"parallel__pp": 8}, 8, "parallel.pp", "at most 4 stages"),
        (
            {"parallel__pp": 2, "parallel__stage_split": "1,2,1"},
            2,
            "parallel.stage_split",
            "2 numbers, one for each stage (pp x stages_per_rank)",
        ),
        (
            {"parallel__pp": 2, "parallel__schedule": "zbv", "parallel__zero": 1, "parallel__stage_split": "1,3"},
            2,
            "parallel.stage_split",
            "4 numbers, one for each stage (pp x stages_per_rank)",
        ),
        (
            {"parallel__pp": 2, "parallel__stage_split": "1,2"},
            2,
            "parallel.stage_split",
            "numbers that add up to n_layers = 4, not to 3",
        ),
        ({"parallel__layout": "auto", "parallel__tp": 2}, None, "parallel.tp", 'nothing beside layout = "auto"'),
        (
            {"parallel": {"layout": "auto", "schedule": "zbv"}},
            None,
            "parallel.schedule",
            'nothing beside layout = "auto"',
        ),
        (
            {"parallel__layout": "auto", "parallel__stage_split": "2,2"},
            2,
            "parallel.stage_split",
            'cost or even beside layout = "auto"',
        ),
        ({"parallel__pp": 4, "parallel__schedule": "interleaved_1f1b"}, 4, "parallel.pp", "pp x stages_per_rank is 8"),
        ({"parallel__pp": -1, "parallel__dp_shard": 1}, 8, "parallel.pp", "at most 4 stages"),
        ({"model__args": {"dim": 130}}, None, "model.args.dim", "a multiple of n_heads = 4"),
        ({"model__args": {"dim": 132}}, None, "model.args.dim", "an even width of each head, not 33"),
        ({"model__args": {"head_dim": 33}}, None, "model.args.dim", "an even width of each head, not 33"),
        (
            {"model__args__rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            None,
            "model.args.rope_scaling.high_freq_factor",
            "more than low_freq_factor = 1",
        ),
        (
            {"model__args__rope_scaling": {"type": "yarn", "factor": 4.0}},
            None,
            "model.args.rope_scaling.original_max_position_embeddings",
            "a value with type yarn",
        ),
        (
            {"model__args__rope_scaling": {**LLAMA3, "beta_fast": 32.0}},
            None,
            "model.args.rope_scaling.beta_fast",
            "none with type llama3",
        ),
        (
            {"model__args": {"rope_theta": 1.0, "rope_scaling": {**YARN, "beta_fast": 64.0}}},
            None,
            "model.args.rope_theta",
            "more than 1 with yarn",
        ),
        (
            {"model__args__rope_scaling": {**YARN, "beta_slow": 64.0}},
            None,
            "model.args.rope_scaling.beta_fast",
            "more than beta_slow = 64",
        ),
        (
            {"lr_scheduler": {"warmup_steps": 10, "decay_ratio": 0.9}},
            None,
            "lr_scheduler.decay_ratio",
            "at most 0.75, as the decay begins after the warm-up",
        ),
        ({"model__attn_backend": "flex"}, None, "model.attn_backend", "computes no gradients on CPUs"),
        (
            {"model__attn_backend": "varlen", "cluster__device": "cuda", "training__mixed_precision_param": "float32"},
            None,
            "model.attn_backend",
            "16 bits only",
        ),
        (
            {"model__attn_backend": "varlen", "cluster__device": "cuda", "model__args": {"head_dim": 36}},
            None,
            "model.attn_backend",
            "multiples of 8 up to 256",
        ),
        ({"model__args": {"n_kv_heads": 3}}, None, "model.args.n_kv_heads", "a divisor of n_heads = 4"),
        ({"model__args": {"ffn_dim": 0}}, None, "model.args.ffn_dim", "a positive width"),
        ({"model__args": {"moe": MOE}}, None, "model.args.ffn_dim", "none beside [model.args.moe]"),
        (
            {"model": EXPERTS, "model__args__moe": {**MOE, "top_k": 9}},
            None,
            "model.args.moe.top_k",
            "at most num_experts = 8",
        ),
        (
            {"model": EXPERTS, "model__args__moe": {**MOE, "num_groups": 3}},
            None,
            "model.args.moe.num_groups",
            "a divisor of num_experts = 8",
        ),
        (
            {"model": EXPERTS, "model__args__moe": {**MOE, "num_groups": 4, "top_groups": 5}},
            None,
            "model.args.moe.top_groups",
            "at most num_groups = 4",
        ),
        (
            {"model": EXPERTS, "model__args__moe": {**MOE, "num_groups": 8, "top_groups": 1, "top_k": 2}},
            None,
            "model.args.moe.top_groups",
            "groups that hold top_k = 2 experts, at 1 a group",
        ),
        ({"model": EXPERTS, "parallel__ep": 3}, 3, "parallel.ep", "a divisor of num_experts = 8"),
        ({"model": EXPERTS, "parallel__ep": 8}, 4, "parallel.ep", "a divisor of dp_shard x cp = 4"),
        ({"parallel__ep": 2}, 4, "parallel.ep", "1 for a model without experts"),
        ({"parallel__pp": 2, "parallel__zero": 2}, 2, "parallel.zero", "1 or 3 with pp > 1"),
        ({"parallel__pp": 2, "parallel__schedule": "zbv"}, 2, "parallel.zero", "silently computes wrong gradients"),
        (
            {"parallel__pp": 2, "parallel__schedule": "dualpipev"},
            2,
            "parallel.zero",
            "silently computes wrong gradients",
        ),
        ({"parallel__pp": 2, "parallel__schedule": "interleaved_zero_bubble"}, 2, "parallel.zero", "torch 2.13"),
        ({"parallel__pp": -1, "parallel__dp_shard": 1, "parallel__schedule": "zbv"}, 2, "parallel.zero", "torch 2.13"),
        (
            {"parallel__pp": 2, "parallel__stages_per_rank": 2},
            2,
            "parallel.stages_per_rank",
            "1 with the schedule 1f1b",
        ),
        (
            {"parallel__pp": 2, "parallel__schedule": "interleaved_1f1b", "parallel__stages_per_rank": 1},
            2,
            "parallel.stages_per_rank",
            "at least 2",
        ),
        (
            {"parallel__pp": 2, "parallel__zero": 1, "parallel__schedule": "zbv", "parallel__stages_per_rank": 1},
            2,
            "parallel.stages_per_rank",
            "exactly 2",
        ),
        ({"data__held_out": "s3://corpus/train/"}, None, "data.held_out", "another split than data.train"),
        ({"data__held_out": None, "validation__freq": 5}, None, "validation.freq", "0 without a held-out split"),
        (
            {"lr_scheduler__warmup_steps": 41},
            None,
            "lr_scheduler.warmup_steps",
            "at most lr_scheduler.total_steps = 40",
        ),
        (
            {"lr_scheduler__total_steps": 20, "lr_scheduler__min_lr_factor": 0},
            None,
            "lr_scheduler.total_steps",
            "at least training.steps = 40",
        ),
    ],
)
def test_rule_broken_is_told_with_its_remedy(changes, world, key, text):
    with pytest.raises(Problems) as caught:
        parse_job(tables(**changes), world)
    (problem,) = (each for each in caught.value.problems if text in each.expected)
    assert problem.where == key and problem.remedy


def test_layout_of_another_world_is_refused_by_layout_itself():
    job = sample(parallel__tp=2, parallel__pp=2)
    assert job.layout(8) == Layout(pp=2, dp_shard=2, tp=2)
    with pytest.raises(Problems, match="divides the 6 ranks"):
        job.layout(6)


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
)
def test_schedule_with_whole_weights_is_accepted_and_without_pipeline_ignored(schedule):
    assert sample(parallel__pp=2, parallel__zero=1, parallel__schedule=schedule).layout(4).pp == 2
    job = sample(parallel__schedule=schedule, parallel__zero=3, data__held_out=None)
    assert job.layout(4) == Layout(dp_shard=4)
    assert without_effect(job, job.layout(4)) == ("parallel.schedule has no effect, because parallel.pp is 1",)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({}, ()),
        ({"parallel__stages_per_rank": 2}, ("parallel.stages_per_rank has no effect, because parallel.pp is 1",)),
        (
            {"lr_scheduler": {"decay_type": "none", "total_steps": 50}},
            ('lr_scheduler.total_steps has no effect, because lr_scheduler.decay_type is "none"',),
        ),
        ({"lr_scheduler__decay_type": "none"}, ()),
        (
            {"lr_scheduler": {"decay_type": "none", "decay_ratio": 0.2}},
            ('lr_scheduler.decay_ratio has no effect, because lr_scheduler.decay_type is "none"',),
        ),
        ({"parallel__stage_split": "cost"}, ("parallel.stage_split has no effect, because parallel.pp is 1",)),
        (
            {"activation_checkpoint__every": 2},
            ('activation_checkpoint.every has no effect, because activation_checkpoint.mode is "none"',),
        ),
        (
            {"parallel__cp_comm_type": "a2a"},
            ("parallel.cp_comm_type has no effect, because parallel.cp is 1",),
        ),
        (
            {"model": EXPERTS, "model__args__moe": {**MOE, "bias_update_rate": 0.1, "num_groups": 2, "top_groups": 2}},
            (
                "model.args.moe.bias_update_rate has no effect, because model.args.moe.selection_bias is false: there "
                "is no bias",
                "model.args.moe.num_groups has no effect, because model.args.moe.top_groups is all of them",
            ),
        ),
        (
            {"cluster__gpu_memory_gib": 24.0},
            ('cluster.gpu_memory_gib has no effect, because cluster.device is "cpu"',),
        ),
        (
            {"parallel__cpu_offload": True},
            (
                'parallel.cpu_offload has no effect, because cluster.device is "cpu": all is in the host\'s memory '
                "already",
            ),
        ),
        ({"parallel__cpu_offload": True, "cluster__device": "cuda"}, ()),
        (
            {"data__held_out": "s3://corpus/held_out"},
            ("data.held_out has no effect, because validation.freq is 0",),
        ),
        (
            {"deadlines": {"step_s": 10.0, "save_s": 20.0, "stop_grace_s": 29.0}},
            (
                "deadlines.stop_grace_s is 29 s, less than step_s + save_s = 30 s: "
                "a stop may kill ranks before their checkpoint is committed",
            ),
        ),
        ({"deadlines": {"step_s": 10.0, "save_s": 20.0, "stop_grace_s": 30.0}}, ()),
        (
            {"training__global_batch_size": 10, "parallel__local_batch_size": 4},
            (
                "parallel.local_batch_size is 4: a data-parallel rank has at most 3 of the step's 10 windows "
                "(training.global_batch_size over 4 of them), and computes the rest of each micro-batch for nothing; "
                "lower it to 3",
            ),
        ),
        ({"training__global_batch_size": 10, "parallel__local_batch_size": 3}, ()),
    ],
)
def test_setting_without_effect_is_told_with_the_reason(changes, told):
    job = sample(**{"data__held_out": None, **changes})
    assert without_effect(job, job.layout(4)) == told


def test_setting_that_only_phalanx_run_reads_is_told_under_torchrun():
    changes = {"cluster__nproc": 4, "recovery__max_attempts_without_progress": 3, "deadlines__stop_grace_s": 5.0}
    job = sample(data__held_out=None, **changes)
    names = ["cluster.nproc", "recovery.max_attempts_without_progress", "deadlines.stop_grace_s"]
    told = without_effect(job, job.layout(4), under_torchrun=True)
    assert [line.split(" has no effect")[0] for line in told] == names
    assert without_effect(sample(data__held_out=None), job.layout(4), under_torchrun=True) == ()


def test_setting_that_only_services_read_is_told_without_them():
    recovery = {"on_nan": "skip", "on_spike": "roll_back", "on_bad_shard": "skip"}
    changes = {"checkpoint": {"keep_latest_k": 2, "keep_every_n": 10}, "recovery": recovery, "deadlines__plan_s": 9.0}
    job = sample(data__held_out=None, **changes)
    told = without_effect(job, job.layout(4))
    policies = ["recovery.on_nan", "recovery.on_spike", "recovery.on_bad_shard"]
    names = ["checkpoint.keep_latest_k", *policies, "deadlines.plan_s"]
    assert [line.split(" has no effect")[0] for line in told] == names
    assert without_effect(job, job.layout(4), under_services=True) == ()


def test_roll_back_at_nan_is_done_by_the_ranks_themselves_unless_the_first_step_ends_the_job():
    job = sample(data__held_out=None, recovery__on_nan="roll_back")
    assert without_effect(job, job.layout(4)) == without_effect(job, job.layout(4), under_services=True) == ()
    stops = sample(data__held_out=None, recovery__on_nan="roll_back", training__non_finite="stop")
    told = ('recovery.on_nan has no effect, because training.non_finite is "stop", which ends the job at the first',)
    assert without_effect(stops, stops.layout(4)) == told


def test_keep_every_n_without_retention_is_told():
    job = sample(data__held_out=None, checkpoint__keep_every_n=10)
    reason = "checkpoint.keep_latest_k is 0: all checkpoints stay"
    told = (f"checkpoint.keep_every_n has no effect, because {reason}",)
    assert without_effect(job, job.layout(4), under_services=True) == told


@pytest.mark.parametrize(
    "checkpoint, names",
    [
        ({"keep_best_m": 1}, ["keep_best_m"]),
        ({"keep_latest_k": 1, "keep_best_m": 1}, []),
        ({"keep_best_by": "loss", "keep_best_order": "max"}, ["keep_best_by", "keep_best_order"]),
        ({"keep_latest_k": 1, "keep_best_m": 1, "keep_best_by": "validation_loss"}, ["keep_best_m"]),
        ({"interval": 10, "speculative_interval": 20}, ["speculative_interval"]),
        ({"interval": 10, "speculative_interval": 4, "speculative_keep_k": 2}, []),
        ({"interval": 10, "memory_interval": 20}, ["memory_interval"]),
        ({"interval": 10, "memory_interval": 4}, []),
        ({"interval": 10, "memory_interval": 100_001}, ["memory_interval"]),
        ({"interval": 10, "speculative_interval": 100_001}, ["speculative_interval"]),
        (
            {"speculative_keep_k": 2, "speculative_healthy_steps": 5},
            ["speculative_keep_k", "speculative_healthy_steps"],
        ),
    ],
)
def test_setting_of_best_or_speculative_checkpoints_without_effect_is_told(checkpoint, names):
    job = sample(data__held_out=None, checkpoint=checkpoint)
    told = without_effect(job, job.layout(4), under_services=True)
    assert [line.split(" has no effect")[0] for line in told] == [f"checkpoint.{name}" for name in names]


@pytest.mark.parametrize(
    "changes, key, expected",
    [
        ({"checkpoint__keep_best_by": "accuracy"}, "checkpoint.keep_best_by", "'loss' or 'validation_loss'"),
        ({"checkpoint__keep_best_order": "least"}, "checkpoint.keep_best_order", "'min' or 'max'"),
        ({"checkpoint__speculative_keep_k": 0}, "checkpoint.speculative_keep_k", "at least 1"),
        ({"recovery__on_spike": "restart"}, "recovery.on_spike", "'notify', 'skip' or 'roll_back'"),
        ({"recovery__on_hang": "skip"}, "recovery.on_hang", "'restart' or 'notify'"),
        ({"recovery__on_bad_shard": "roll_back"}, "recovery.on_bad_shard", "'stop' or 'skip'"),
        ({"checkpoint__keep_every_n": -1}, "checkpoint.keep_every_n", "at least 0"),
        ({"deadlines__plan_s": 0.0}, "deadlines.plan_s", "above 0"),
    ],
)
def test_policy_that_does_not_exist_is_refused_by_name(changes, key, expected):
    with pytest.raises(Problems) as error:
        parse_job(tables(**changes))
    assert error.value.problems[0].where == key and expected in str(error.value)


def test_context_and_expert_parallel_are_accepted():
    job = parse_job(tables(model=EXPERTS, parallel={"cp": 2, "ep": 8, "dp_shard": 4}), 8)
    assert job.layout(8) == Layout(dp_shard=4, cp=2, ep=8)


def test_demo_job_relaid_by_overrides_keeps_its_schedule_key():
    pipeline = {"pp": 2, "dp_shard": 2, "tp": 2, "schedule": "interleaved_1f1b"}
    assert sample(parallel=pipeline).layout(8).dp == 2
    assert sample(parallel={**pipeline, "pp": 1, "dp_shard": 4, "tp": 1}).layout(4) == Layout(dp_shard=4)


@given(st.integers(1, 4096), st.sampled_from(["pp", "dp_replicate", "dp_shard", "cp", "tp"]), st.data())
def test_resolved_axes_always_multiply_to_the_world(world, open_axis, data):
    sizes = {axis: data.draw(st.integers(1, 4)) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    sizes[open_axis] = 1
    layout = resolve_axes(Parallel(**{**sizes, open_axis: -1}), world)
    if world % math.prod(sizes.values()):
        assert layout is None
    else:
        assert layout is not None and layout.world_size == world
        assert all(getattr(layout, axis) == size for axis, size in sizes.items() if axis != open_axis)
