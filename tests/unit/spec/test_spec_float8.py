"""`training.float8_recipe`: what it goes together with, and what it changes."""

from __future__ import annotations

import pytest
from spec_samples import sample, tables

from phalanx.core.errors import Problems
from phalanx.planner.job_search import run_shape
from phalanx.spec import parse_job
from phalanx.spec.changes import require_forkable, require_resumable

KEY = "training.float8_recipe"
MODEL = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 512}
MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 24, "num_shared_experts": 2}


def job(**changes):
    return tables(**{"training__float8_recipe": "rowwise", "model": {"args": MODEL}, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training__float8_recipe": "e4m3"}, "'none', 'tensorwise' or 'rowwise'"),
        ({"training__mixed_precision_param": "float32"}, 'training.mixed_precision_param = "bfloat16"'),
        ({"training__mixed_precision_param": "float16"}, 'training.mixed_precision_param = "bfloat16"'),
        ({"training__seq_len": 24}, "a multiple of 16 tokens in a micro-batch of one rank, which has 24"),
        ({"training__seq_len": 16, "parallel__cp": 2}, "which has 8 (local_batch_size x seq_len / cp)"),
        ({"parallel__pp": 2, "parallel__schedule": "zbv", "parallel__zero": 1}, "none with the schedule zbv"),
        ({"model": {"args": {**MODEL, "dim": 72, "n_heads": 2}}}, "a multiple of 16 as model.args.dim = 72"),
        ({"parallel__tp": 4, "model": {"args": {**MODEL, "n_kv_heads": 4}}}, None),
        ({"parallel__tp": 2, "model": {"args": {**MODEL, "n_heads": 8}}}, "what model.args.n_kv_heads makes 16 wide"),
        ({"parallel__tp": 4}, "what model.args.ffn_dim makes 96 wide, where 4 leaves 24"),
        ({"parallel__tp": 2, "model": {"args": {**MODEL, "moe": MOE}}}, "moe.expert_ffn_dim makes 48 wide"),
        ({"model": {"args": {**MODEL, "ffn_dim": 100}}}, None),
        ({"parallel__cp": 2}, None),
        ({"parallel__pp": 2, "parallel__schedule": "interleaved_1f1b"}, None),
    ],
)
def test_recipe_is_refused_in_one_line_where_it_cannot_be_right(changes, expected):
    if expected is None:
        changes = {**changes, "model": {"args": {**changes.get("model", {}).get("args", MODEL), "ffn_dim": 256}}}
        assert parse_job(job(**changes)).training.float8_recipe == "rowwise"
        return
    with pytest.raises(Problems) as caught:
        parse_job(job(**changes))
    found = [each for each in caught.value.problems if each.where == KEY and expected in each.expected]
    assert len(found) == 1 and found[0].remedy, caught.value


def test_recipe_makes_another_run_that_may_be_forked_both_ways():
    plain, narrow = (parse_job(job(training__float8_recipe=recipe)) for recipe in ("none", "tensorwise"))
    assert "float8_recipe" not in plain.identity()["training"]
    assert narrow.identity()["training"]["float8_recipe"] == "tensorwise"
    require_forkable(plain, narrow)
    require_forkable(narrow, plain)
    with pytest.raises(Problems, match=r"training\.float8_recipe is 'tensorwise'.*fork the job"):
        require_resumable(plain, narrow)


@pytest.mark.parametrize(
    ("recipe", "precision"), [("none", "bf16"), ("tensorwise", "fp8-current"), ("rowwise", "fp8-rowwise")]
)
def test_planner_counts_products_in_what_they_are_computed_in(recipe, precision):
    shape = run_shape(parse_job(job(training__float8_recipe=recipe)))
    assert shape.precision == precision and shape.param_bytes == 2


def test_jobs_without_the_key_keep_their_digest():
    assert sample().identity() == sample(training__float8_recipe="none").identity()
