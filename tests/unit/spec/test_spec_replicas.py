"""Keys of what replicas over slow links tell each other."""

from __future__ import annotations

import pytest
from spec_samples import sample, tables

from phalanx.core.errors import Problems
from phalanx.spec import parse_job
from phalanx.spec.changes import When, changes
from phalanx.spec.effects import without_effect
from phalanx.spec.layout import Layout

MOE = {"args": {"dim": 64, "n_layers": 4, "n_heads": 4, "vocab_size": 512}}
MOE["args"]["moe"] = {"num_experts": 8, "top_k": 2, "expert_ffn_dim": 128}
POWER = {"gradient_compression__method": "powersgd"}
TEN = {"local_updates__steps": 10, "checkpoint__interval": 20}


def refusal(**keys: object) -> str:
    with pytest.raises(Problems) as told:
        parse_job(tables(**keys))
    assert len(told.value.problems) == 1, told.value
    return str(told.value.problems[0])


@pytest.mark.parametrize(
    ("keys", "where", "text"),
    [
        ({**TEN, "training__steps": 45}, "training.steps is 45", "a multiple of local_updates.steps = 10"),
        ({**TEN, "checkpoint__interval": 15}, "checkpoint.interval is 15", "use 20, or change local_updates.steps"),
        ({**TEN, "checkpoint__speculative_interval": 5}, "checkpoint.speculative_interval", "hold one model"),
        ({**TEN, "checkpoint__memory_interval": 5}, "checkpoint.memory_interval", "hold one model"),
        ({**TEN, "validation__freq": 25}, "validation.freq is 25", "use 30"),
        ({**TEN, "optimizer__class": "mine:Rule"}, "local_updates.steps is 10", "0 beside optimizer.class"),
        ({**TEN, "parallel__cpu_offload": True}, "local_updates.steps is 10", "0 beside parallel.cpu_offload"),
        ({**TEN, "model": MOE}, "local_updates.steps is 10", "0 with experts"),
        ({**TEN, "parallel__layout": "auto"}, "parallel.layout", "where the number of replicas changes"),
        ({**POWER, "parallel__tp": 2}, "parallel.tp is 2", "takes dp_replicate and dp_shard only"),
        ({**POWER, "parallel__pp": 2}, "parallel.pp is 2", "takes dp_replicate and dp_shard only"),
        ({**POWER, "parallel__cp": 2}, "parallel.cp is 2", "takes dp_replicate and dp_shard only"),
        ({**POWER, **TEN}, "gradient_compression.method", '"none" beside local_updates'),
        ({**POWER, "optimizer__class": "mine:Rule"}, "gradient_compression.method", "none beside optimizer.class"),
        ({**POWER, "parallel__cpu_offload": True}, "gradient_compression.method", "none beside parallel.cpu_offload"),
        ({**POWER, "model": MOE}, "gradient_compression.method", "none with experts"),
        ({**POWER, "parallel__layout": "auto"}, "parallel.layout", "with gradient_compression"),
        ({"gradient_compression__method": "onebit_adam"}, "gradient_compression.warmup_steps is 0", "at least 1"),
        ({"gradient_compression__method": "signs"}, "gradient_compression.method", "'powersgd' or 'onebit_adam'"),
        ({**POWER, "gradient_compression__rank": 0}, "gradient_compression.rank", "a number above 0"),
        ({**POWER, "gradient_compression__warmup_steps": -1}, "gradient_compression.warmup_steps", "at least 0"),
        ({**POWER, "gradient_compression__compressed": "all"}, "gradient_compression.compressed", "'hidden' or 'matr"),
        ({"local_updates__steps": -1}, "local_updates.steps is -1", "a number at least 0"),
        ({**TEN, "local_updates__outer_lr": 0.0}, "local_updates.outer_lr", "a number above 0"),
        ({**TEN, "local_updates__outer_momentum": 1.0}, "local_updates.outer_momentum", "a number below 1"),
        ({"local_updates__steps": 2.5}, "local_updates.steps", "a whole number"),
    ],
)
def test_what_local_updates_cannot_do_is_one_line(keys: dict[str, object], where: str, text: str) -> None:
    told = refusal(**keys)
    assert where in told and text in told


def test_every_layout_of_the_replicas_is_taken() -> None:
    for parallel in (
        {"dp_replicate": 2},
        {"dp_replicate": 2, "tp": 2},
        {"dp_replicate": 2, "pp": 2, "dp_shard": 2},
        {},
    ):
        layout = sample(**TEN, parallel=parallel).layout(8)
        assert layout.world_size == 8


def test_keys_are_no_part_of_the_identity_of_a_job_without_them() -> None:
    assert "local_updates" not in sample().identity()
    assert "local_updates" not in sample(local_updates__outer_lr=0.3).identity()
    assert sample(**TEN).identity()["local_updates"] == {"steps": 10, "outer_lr": 0.7, "outer_momentum": 0.9}


def test_compression_is_part_of_the_identity_as_far_as_it_has_effect() -> None:
    assert "gradient_compression" not in sample(gradient_compression__rank=8).identity()
    identity = sample(**POWER).identity()["gradient_compression"]
    assert identity == {"method": "powersgd", "rank": 4, "compressed": "hidden", "warmup_steps": 0}
    everything = sample(**POWER, gradient_compression__compressed="matrices").identity()["gradient_compression"]
    assert everything == {"method": "powersgd", "rank": 4, "warmup_steps": 0}, "as it was before the key"
    signs = sample(gradient_compression={"method": "onebit_adam", "warmup_steps": 8}).identity()
    assert signs["gradient_compression"] == {"method": "onebit_adam", "warmup_steps": 8}


def test_keys_of_a_compression_that_is_another_are_told() -> None:
    layout = Layout(dp_replicate=2)
    signs = {"method": "onebit_adam", "warmup_steps": 8, "rank": 4, "compressed": "hidden"}
    for keys, named in (
        (signs, ["rank", "compressed"]),
        ({"rank": 4, "warmup_steps": 3}, ["rank", "warmup_steps"]),
        ({"method": "powersgd", "rank": 4, "compressed": "hidden", "warmup_steps": 3}, []),
    ):
        told = without_effect(sample(gradient_compression=keys, parallel={"dp_replicate": 2}), layout)
        assert [key for key in named if any(f"gradient_compression.{key} has no" in each for each in told)] == named
        assert sum("gradient_compression" in each for each in told) == len(named)


def test_change_of_the_steps_is_a_fork() -> None:
    found = {each.key: each.when for each in changes(sample(checkpoint__interval=20), sample(**TEN))}
    assert found == {"local_updates.steps": When.FORK}
