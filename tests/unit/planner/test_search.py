"""The search for the best layout: against trying everything, against the job file's own rules, and in its words."""

from __future__ import annotations

import time
import tomllib
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.planner.gpus import find_gpu
from phalanx.planner.layouts import (
    Candidate,
    Task,
    base_candidates,
    divisors,
    largest_mesh,
    layouts,
    micro_batches,
    scheduled,
)
from phalanx.planner.memory import rank_memory
from phalanx.planner.network import cluster
from phalanx.planner.rivals import layout_line, memory_line, parallel_section, parts, rivals, step_line, why_not
from phalanx.planner.search import Search, pipeline_run
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.stages import num_micro_batches
from phalanx.spec import Layout, parse_job
from phalanx.spec.parallel import ZERO_BUBBLE_SCHEDULES
from phalanx.spec.source import read_toml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
H100 = find_gpu("H100-80")
LIMIT = int(0.95 * H100.memory_bytes)
LLAMA_8B = ModelShape(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, vocab_size=128_256)
LLAMA_70B = ModelShape(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672, vocab_size=128_256)
DENSE_1T = ModelShape(dim=25_600, n_layers=128, n_heads=160, n_kv_heads=8, ffn_dim=86_016, vocab_size=128_256)
MIXTRAL = ModelShape(4096, 32, 32, 8, 0, 32_000, num_experts=8, top_k=2, expert_ffn_dim=14_336)


def a_task(model=LLAMA_8B, gpus=64, batch=512, **more):
    return Task(model, RunShape(8192, batch), gpus, cluster("H100-80"), **more)


@pytest.fixture(scope="module")
def search_70b():
    return Search(a_task(LLAMA_70B, 512, 1024, most_cp=1), LIMIT)


def test_best_is_the_fastest_of_all_that_fit():
    search = Search(a_task(gpus=16, batch=64), LIMIT)
    fitting = [each for each in search.estimates if search.fits(each.candidate)]
    assert 0 < len(fitting) < len(search.estimates)
    assert search.best.step.total_s == min(each.step.total_s for each in fitting)
    assert search.best.tokens_per_s == pytest.approx(64 * 8192 / search.best.step.total_s)


@pytest.mark.parametrize(
    "changes", [{}, {"cpu_offload": True}, {"paging_bytes": 1 << 20}, {"optimizer": "muon"}, {"reduce_bytes": 2}]
)
def test_a_floor_of_the_states_never_exceeds_the_memory_that_is_counted(changes):
    task = a_task(LLAMA_70B, 64, 256)
    task = replace(task, run=replace(task.run, **changes))
    search = Search(task, LIMIT)
    for layout in layouts(task):
        for candidate in base_candidates(task, layout):
            assert search._states_bytes(candidate) <= search.memory(candidate).total_bytes


def test_stated_stages_are_of_one_layout_and_count_there_alone():
    run = RunShape(8192, 256, stage_split=(30, 30, 10, 10), schedule="interleaved_1f1b", stages_per_rank=2, zero=1)
    search = Search(a_task(LLAMA_70B, 64, 256), LIMIT)
    own = Candidate(Layout(pp=2, tp=8, dp_shard=4), run)
    even = replace(own, run=replace(run, stage_split="even"))
    assert search.estimate(own).step.total_s == pytest.approx(search.estimate(even).step.total_s), "40 layers a rank"
    assert search.memory(own).position.layers_by_stage in [(30, 10), (30, 10)]
    lopsided = replace(own, run=replace(run, stage_split=(30, 20, 20, 10)))
    assert search.estimate(lopsided).step.total_s > 1.1 * search.estimate(even).step.total_s


def test_1t_on_16384_gpus_is_searched_in_two_seconds_of_one_core():
    started = time.process_time()
    search = Search(a_task(DENSE_1T, 16_384, 3072), LIMIT)
    assert rivals(search)
    assert time.process_time() - started < 2
    best = search.best.candidate
    assert best.layout.world_size == 16_384 and search.memory(best).total_bytes <= LIMIT
    assert best.layout.tp == 8 and best.layout.pp >= 8


@pytest.mark.parametrize(("example", "gpus"), [("8b-64gpu", 64), ("175b-1024gpu", 1024)])
def test_every_kind_of_candidate_is_a_job_that_the_spec_accepts(example, gpus):
    raw = {**read_toml(EXAMPLES / f"{example}.toml"), "compile": {"enable": False}}  # which tasks know nothing of
    job = parse_job(raw)
    args = job.model.decoder
    model = ModelShape(args.dim, args.n_layers, args.n_heads, args.n_kv_heads, args.ffn_dim, args.vocab_size)
    run = RunShape(job.training.seq_len, job.training.global_batch_size)
    task = Task(model, run, gpus, cluster("H100-80"))
    found = 0
    for layout in layouts(task):
        candidates = [each for base in base_candidates(task, layout) for each in scheduled(task, base)]
        for candidate in islice(candidates, 0, None, 7):
            tables = tomllib.loads(parallel_section(candidate))
            accepted = parse_job({**raw, **tables}, gpus, check_world=True)
            assert accepted.layout(gpus) == candidate.layout
            found += 1
    assert found > 50


def test_schedules_are_offered_with_and_without_recompute():
    task = a_task()
    plain = Candidate(Layout(pp=2, dp_shard=32), RunShape(8192, 512))
    again = replace(plain, run=replace(plain.run, recompute=True))
    names = [{each.run.schedule for each in scheduled(task, base)} for base in (plain, again)]
    assert names[0] == names[1] >= {"interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"}


def test_recompute_with_a_split_backward_is_the_fastest_that_fits_some_mesh(search_70b):
    mesh = Layout(pp=4, dp_shard=32, tp=4)
    here = [e for e in search_70b.estimates if e.candidate.layout == mesh and e.candidate.run.local_batch_size == 1]
    best = min(filter(lambda each: search_70b.fits(each.candidate), here), key=lambda each: each.step.total_s)
    assert best.candidate.run.recompute and best.candidate.run.schedule in ZERO_BUBBLE_SCHEDULES


def test_ready_section_says_the_whole_candidate():
    run = RunShape(8192, 512, 2, 1, "zbv", 2, recompute=True)
    section = tomllib.loads(parallel_section(Candidate(Layout(pp=4, dp_shard=8, tp=2), run)))
    assert section["parallel"] == {
        "tp": 2,
        "pp": 4,
        "dp_shard": 8,
        "zero": 1,
        "schedule": "zbv",
        "stages_per_rank": 2,
        "stage_split": "even",
        "local_batch_size": 2,
    }
    assert section["activation_checkpoint"] == {"mode": "full"}


def test_step_of_another_schedule_agrees_with_the_simulated_pipeline(search_70b):
    seen = set()
    for estimate in search_70b.estimates:
        candidate, step = estimate.candidate, estimate.step
        key = (candidate.run.schedule, candidate.run.stages_per_rank)
        if candidate.layout.pp != 4 or key in seen:
            continue
        seen.add(key)
        run = pipeline_run(estimate)
        inside = step.compute_s + step.recompute_s + step.tensor_s
        assert step.micro_batches == num_micro_batches(candidate.layout, candidate.run)
        # The model's bubble is that of uneven stages (the head's), and hops are counted as seen.
        assert run.makespan_s == pytest.approx(inside + step.bubble_s + step.pipeline_send_s, rel=0.05)
    assert len(seen) > 4


def test_every_rival_is_slower_or_too_large_and_says_why(search_70b):
    best = search_70b.best
    found = rivals(search_70b)
    keys = {said.split()[0] for rival in found for said in rival.properties}
    assert len({rival.candidate for rival in found}) == len(found)
    assert keys >= {
        "tp",
        "pp",
        "zero",
        "micro-batch",
        "recompute",
        "schedule",
    }
    for rival in found:
        assert rival.candidate != best.candidate
        if rival.estimate is None:
            assert rival.reason.startswith("does not fit") and rival.memory.total_bytes > LIMIT
        else:
            assert rival.estimate.step.total_s >= best.step.total_s
            assert "slower: " in rival.reason or rival.reason.startswith("as fast")
    assert why_not(search_70b, best) == "the best"


def test_a_layout_that_does_not_fit_says_how_much_it_takes(search_70b):
    run = replace(search_70b.task.run, zero=1, recompute=False)
    estimate = search_70b.estimate(Candidate(Layout(dp_shard=512), run))
    assert why_not(search_70b, estimate).startswith("does not fit: ")
    assert memory_line(search_70b.memory(estimate.candidate), LIMIT).endswith("of 75.7 GiB on pipeline rank 0")


def test_parts_of_a_step_add_up_and_are_named(search_70b):
    best = search_70b.best
    assert sum(parts(best.step).values()) == pytest.approx(1, abs=0.01)
    assert "computation" in parts(best.step) and "%" in step_line(best.step)
    assert f"dp {best.candidate.layout.dp}" in layout_line(best.candidate)


def test_experts_are_spread_and_dense_models_have_none():
    assert {each.ep for each in layouts(a_task(MIXTRAL))} == {1, 2, 4, 8}
    assert {each.ep for each in layouts(a_task(MIXTRAL, most_ep=2))} == {1, 2}
    assert {each.ep for each in layouts(a_task())} == {1}


def test_schedules_are_those_that_are_allowed():
    task = a_task(schedules=("interleaved_1f1b",))
    plain = Candidate(Layout(pp=4, dp_shard=16), replace(task.run, zero=1, schedule="1f1b"))
    names = {each.run.schedule for each in scheduled(task, plain)}
    assert names == {"1f1b", "interleaved_1f1b"}


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_model_that_no_layout_holds_is_refused_with_the_remedy(gpus):
    with pytest.raises(PhalanxError, match="take more GPUs"):
        _ = Search(a_task(DENSE_1T, gpus, 64), LIMIT).best


def test_divisors_are_all_and_in_order():
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1]


def test_memory_is_that_of_the_fullest_rank(search_70b):
    candidate = search_70b.best.candidate
    ranks = rank_memory(LLAMA_70B, candidate.layout, candidate.run)
    assert search_70b.memory(candidate).total_bytes == max(rank.total_bytes for rank in ranks)


SMALL = ModelShape(dim=128, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=512, vocab_size=4096)


def test_micro_batches_grow_as_far_as_memory_holds_and_the_best_has_the_fastest():
    task = Task(SMALL, RunShape(128, 4096), 8, cluster("H100-80"), most_cp=1)
    search = Search(task, LIMIT)
    best = search.best
    assert best.candidate.run.local_batch_size > 8
    for size in (1, 8, 10, 48, 100, 512):
        run = replace(best.candidate.run, local_batch_size=size)
        other = search.estimate(replace(best.candidate, run=run))
        assert not search.fits(other.candidate) or other.step.total_s >= 0.98 * best.step.total_s


@pytest.mark.parametrize(
    ("windows", "among"), [(1, {1}), (7, {1, 2, 3, 4, 6, 7}), (125, {5, 25, 96, 125}), (512, {384, 512})]
)
def test_micro_batches_are_powers_threes_and_divisors(windows, among):
    sizes = micro_batches(windows)
    assert sizes == sorted(set(sizes)) and among <= set(sizes) and sizes[0] == 1 and sizes[-1] <= windows


def test_a_layout_that_the_search_did_not_try_and_is_faster_says_so():
    task = Task(SMALL, RunShape(128, 4096), 8, cluster("H100-80"), most_cp=1)
    tried = Search(task, LIMIT)
    slow = tried.estimates[-1].candidate
    only = Search(task, LIMIT)
    only.estimates = (only.estimate(slow),)
    ratio = only.best.step.total_s / tried.best.step.total_s - 1
    assert why_not(only, tried.best).startswith(f"{ratio:.1%} faster: ")


@pytest.mark.parametrize(("gpus", "batch"), [(8072, 512), (8072, 64), (1 << 30, 512)])
def test_gpus_that_no_mesh_has_are_refused_with_a_number_that_one_has(gpus, batch):
    task = a_task(gpus=gpus, batch=batch)
    with pytest.raises(PhalanxError, match="raise training") as caught:
        _ = Search(task, LIMIT).best
    most = largest_mesh(task)
    assert 0 < most < gpus and f"take {most:,} GPUs" in str(caught.value) and any(layouts(replace(task, gpus=most)))


def test_states_that_no_gpu_holds_are_refused_with_what_is_missing():
    with pytest.raises(PhalanxError, match="GiB are missing") as caught:
        _ = Search(a_task(DENSE_1T, 8, 64), LIMIT).best
    assert "75.7" in str(caught.value)
