"""`layout = "auto"`: what is chosen, that it is what `phalanx plan` finds, and what is refused."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.planner.automatic import as_stated, choose, with_layout
from phalanx.planner.gpus import GPUS, find_gpu
from phalanx.planner.job_search import model_shape, new_search, run_shape
from phalanx.spec import Job, Layout, parse_job
from phalanx.spec.job import plain
from phalanx.spec.parallel import CHOSEN, Parallel

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def automatic(example: str, **sections) -> Job:
    """An example whose layout is left to the planner, with keys of other sections changed."""
    tables = tomllib.loads((EXAMPLES / f"{example}.toml").read_text())
    tables |= {"parallel": {"layout": "auto"}}
    tables.pop("activation_checkpoint", None)
    for name, keys in sections.items():
        tables[name] = {**tables.get(name, {}), **keys}
    return parse_job(tables)


def on_cpus(batch: int) -> Job:
    job = _six_layers()
    return job.model_copy(update={"training": job.training.model_copy(update={"global_batch_size": batch})})


@cache
def _six_layers() -> Job:
    tables = plain(automatic("small-cpu"))
    tables["model"]["args"]["n_layers"] = 6
    return parse_job(tables)


@pytest.mark.parametrize(("example", "gpus", "gpu"), [("1b-8gpu", 8, "H100-80"), ("175b-1024gpu", 1024, "H100-80")])
def test_on_gpus_it_is_the_best_of_the_search_of_phalanx_plan(example, gpus, gpu):
    job = automatic(example, cluster={"gpu": gpu, "nproc": 8, "nodes": gpus // 8}, training={"global_batch_size": 2048})
    chosen = choose(job, gpus)
    best = new_search(job, model_shape(job), run_shape(job), gpus, find_gpu(gpu)).best.candidate
    assert chosen.job == as_stated(job, best)
    assert (chosen.job.layout(gpus), run_shape(chosen.job)) == (best.layout, best.run)
    assert chosen.job.parallel.layout == "given" and chosen.said.startswith(f"layout for {gpus:,} ranks: ")
    assert " a step on H100-80, " in chosen.said
    assert with_layout(chosen.job, gpus) is chosen.job


def test_a_choice_is_the_same_again_and_through_a_stored_job():
    job = automatic("1b-8gpu")
    stored = parse_job(plain(job), 8)
    assert choose(job, 8) == choose(stored, 8)
    again = parse_job(plain(with_layout(job, 8)), 8)
    assert again.layout(8) == with_layout(job, 8).layout(8) and again == with_layout(job, 8)


def test_a_recompute_that_is_stated_stays_and_one_that_is_not_is_chosen():
    assert with_layout(automatic("1b-8gpu"), 8).activation_checkpoint.mode == "none"
    stated = automatic("1b-8gpu", activation_checkpoint={"mode": "full"})
    assert with_layout(stated, 8).activation_checkpoint.mode == "full"
    selective = {"mode": "selective", "every": 2}
    chosen = with_layout(automatic("1b-8gpu", activation_checkpoint=selective, compile={"enable": False}), 8)
    assert plain(chosen.activation_checkpoint) == selective


def test_gpus_of_a_node_bound_tensor_parallelism():
    job = automatic("8b-64gpu", training={"global_batch_size": 4})  # windows for four ranks only
    one_box, boxes_of_one = (with_layout(job, 8, gpus_per_node=number).layout(8) for number in (8, 1))
    assert one_box.tp > 1 and (boxes_of_one.tp, boxes_of_one.pp > 1) == (1, True)


@pytest.mark.parametrize(
    ("batch", "world_size", "layout"),
    [
        (8, 1, Layout()),
        (8, 8, Layout(dp_shard=8)),
        (4, 8, Layout(dp_shard=4, tp=2)),
        (4, 6, Layout(dp_shard=3, tp=2)),
        (1, 3, Layout(pp=3)),  # no head count divides by 3
        (3, 7, Layout(dp_shard=7)),  # neither heads nor layers allow 7
    ],
)
def test_on_cpus_it_is_data_parallel_over_as_many_ranks_as_a_batch_has_windows(batch, world_size, layout):
    chosen = choose(on_cpus(batch), world_size)
    assert chosen.job.layout(world_size) == layout and chosen.job.parallel.zero == 3
    assert f"dp_shard {layout.dp_shard}" in chosen.said


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 64), st.integers(1, 64))
def test_on_cpus_every_number_of_ranks_has_a_layout(batch, world_size):
    assert with_layout(on_cpus(batch), world_size).layout(world_size).world_size == world_size


def test_a_class_of_the_users_own_takes_all_cpus_as_data_parallel_and_is_refused_on_gpus():
    tables = plain(automatic("small-cpu"))
    tables["model"] = {"class": "package.module:Class", "args": {}}
    assert with_layout(parse_job(tables), 64).layout(64) == Layout(dp_shard=64)
    tables["cluster"] |= {"device": "cuda", "gpu": "H100-80"}
    with pytest.raises(PhalanxError, match=r'^parallel\.layout is .auto.: expected "given" beside model\.class'):
        choose(parse_job(tables), 8)


@pytest.mark.parametrize(
    ("cluster", "key"),
    [
        ({"gpu": None}, r"cluster\.gpu: "),
        ({"gpu": "H9"}, r"cluster\.gpu is 'H9': "),
        ({"gpu_memory_gib": 80.0}, r"cluster\.gpu_memory_gib is 80\.0: "),
    ],
)
def test_gpus_that_the_planner_cannot_time_are_refused_by_key_with_those_it_knows(cluster, key):
    tables = plain(automatic("1b-8gpu"))
    tables["cluster"] |= cluster
    with pytest.raises(PhalanxError, match=f"^{key}") as refusal:
        choose(parse_job(tables), 8)
    assert all(kind in str(refusal.value) for kind in GPUS) and "\n" not in str(refusal.value)


def test_a_model_that_fits_no_layout_is_refused():
    with pytest.raises(PhalanxError, match=r"^layout is '8 GPUs': "):
        choose(automatic("405b-4096gpu"), 8)


OTHERS = {"schedule": "gpipe", "cp_comm_type": "a2a", "dp_shard": 2, "zero": 1}


@pytest.mark.parametrize("key", CHOSEN)
def test_a_key_that_is_chosen_is_refused_beside_auto_and_its_default_is_not(key):
    default = Parallel.model_fields[key].default
    tables = plain(automatic("small-cpu"))
    parse_job({**tables, "parallel": {"layout": "auto", key: default}}, 2)
    with pytest.raises(PhalanxError, match=rf"parallel\.{key} is .* beside layout = \"auto\"") as refusal:
        parse_job({**tables, "parallel": {"layout": "auto", key: OTHERS.get(key, 2)}}, 2)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_layout_that_was_not_chosen_is_none():
    with pytest.raises(PhalanxError, match=r"^parallel\.layout is 'auto': expected a layout that was chosen"):
        automatic("small-cpu").layout(2)


def test_who_chose_is_no_part_of_identity_or_placement():
    job = automatic("small-cpu")
    given_job = with_layout(job, 2)
    assert job.identity() == given_job.identity()
    assert "layout" not in given_job.placement(2)["parallel"] and given_job.placement(2)["parallel"]["dp_shard"] == 2
