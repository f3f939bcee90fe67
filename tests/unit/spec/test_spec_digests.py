from __future__ import annotations

import pytest
from spec_samples import sample

from phalanx.core.errors import PhalanxError

DATA = {"train": "sha256:" + "ab" * 32}

# A promise: a job of an earlier version resumes. If this fails, the change breaks every run that exists.
GOLDEN = "sha256:04d720f177241cd0553eb1b54325f6aa08c6c8964814a12e40f4c82a10beaf58"


def test_identity_digest_of_the_sample_is_frozen():
    assert sample().identity_digest(DATA) == GOLDEN


@pytest.mark.parametrize(
    "changes",
    [
        {"job__name": "other", "job__storage": "s3://b/x"},
        {
            "data__train": "s3://mirror/train",
            "data__train_digest": DATA["train"],
            "data__held_out_digest": "sha256:" + "cd" * 32,
        },
        {"parallel": {"tp": 2, "pp": 2, "local_batch_size": 4, "zero": 1}, "cluster__device": "cuda"},
        {"checkpoint__interval": 3, "validation__freq": 7, "metrics__enable_wandb": True, "deadlines__step_s": 5},
        {"recovery": {"on_nan": "roll_back", "on_spike": "skip", "on_hang": "notify", "on_bad_shard": "skip"}},
        {"checkpoint": {"keep_latest_k": 2, "keep_every_n": 1000}, "deadlines__plan_s": 60},
        {"checkpoint": {"keep_best_m": 2, "keep_best_by": "validation_loss", "speculative_interval": 10}},
        {
            "optimizer__implementation": "foreach",
            "activation_checkpoint": {"mode": "full", "every": 2},
            "compile__enable": True,
        },
        {"training__deterministic": True, "storage__b__region": "x"},
        {"training__steps": 80, "lr_scheduler__total_steps": 40},
        {"model__args": {"head_dim": 32, "qk_norm": False, "qkv_bias": False}},
        {
            "model": {
                "args": {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 384, "vocab_size": 4096}
            }
        },
    ],
)
def test_identity_ignores_what_does_not_make_the_run(changes):
    assert sample(**changes).identity_digest(DATA) == GOLDEN


@pytest.mark.parametrize(
    "changes",
    [
        {"training__seed": 1},
        {"training__seq_len": 64},
        {"training__global_batch_size": 8},
        {"optimizer__lr": 2e-3},
        {"model__args": {"n_layers": 5}},
        {"model__args": {"head_dim": 64}},
        {"model__args": {"qk_norm": True}},
        {"model__args": {"qkv_bias": True}},
        {"model__args": {"rope_scaling": {"type": "linear", "factor": 2.0}}},
        {"data__document_mask": False},
        {"training__mixed_precision_param": "float32"},
        {"training__mixed_precision_param": "float16"},
        {"training__steps": 80},
        {"lr_scheduler__decay_type": "none"},
        {"lr_scheduler__decay_type": "sqrt"},
        {"lr_scheduler__decay_ratio": 0.2},
        {"loss__z_loss": 1e-4},
        {"optimizer__decayed": "all"},
        {"optimizer__name": "muon"},
    ],
)
def test_identity_follows_what_makes_the_run(changes):
    assert sample(**changes).identity_digest(DATA) != GOLDEN
    assert sample().identity_digest({"train": "sha256:" + "00" * 32}) != GOLDEN


def test_schedule_without_decay_leaves_the_length_out_of_the_identity():
    short, long = (sample(training__steps=steps, lr_scheduler__decay_type="none") for steps in (40, 80))
    assert short.identity() == long.identity()


def test_train_digest_that_the_data_has_not_is_refused():
    job = sample(data__train_digest="sha256:" + "00" * 32)
    with pytest.raises(PhalanxError, match=r"data\.train_digest"):
        job.identity_digest(DATA)


def test_placement_is_resolved_and_differs_by_world():
    job = sample(parallel__tp=2)
    four, eight = job.placement(4), job.placement(8)
    assert four["parallel"]["dp_shard"] == 2 and eight["parallel"]["dp_shard"] == 4 and eight["world_size"] == 8
    assert set(eight) == {"parallel", "cluster", "world_size"} and eight["cluster"]["device"] == "cpu"


def test_offload_is_placement_and_its_absence_is_what_was_before_it():
    plain, offloading = sample(), sample(parallel__cpu_offload=True)
    assert plain.identity() == offloading.identity()
    assert "cpu_offload" not in plain.placement(2)["parallel"]
    assert offloading.placement(2)["parallel"]["cpu_offload"] is True


def test_stage_split_is_placement_of_a_pipeline_alone():
    one, two = sample(parallel__pp=1), sample(parallel__pp=2, parallel__stage_split="3,1")
    assert one.identity() == two.identity()
    assert "stage_split" not in one.placement(2)["parallel"]
    assert two.placement(2)["parallel"]["stage_split"] == "3,1"
