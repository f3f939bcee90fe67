"""The simulated pipeline: what must hold of any run, and the closed formulas where papers give them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.planner import stage_passes_in_flight
from phalanx.planner.bubble_formulas import bubble_by_formula
from phalanx.planner.pipeline import StageCosts, bubble_left, simulate
from phalanx.planner.pipeline_order import SCHEDULES, Kind, rank_stages
from phalanx.planner.shape import RunShape
from phalanx.spec import Layout
from phalanx.spec.parallel import V_SCHEDULES

SECONDS = st.floats(0.01, 4.0)


@st.composite
def runs(draw):
    """(pp, stages a rank, costs, run) of any schedule, counts and costs."""
    schedule, pp = draw(st.sampled_from(SCHEDULES)), draw(st.integers(1, 5))
    per_rank = (
        1 if schedule in ("gpipe", "1f1b") else 2 if schedule in ("zbv", "dualpipev") else draw(st.integers(1, 3))
    )
    micro_batches = pp * draw(st.integers(1, 4)) * (2 if schedule == "dualpipev" else 1)
    each = st.lists(SECONDS, min_size=pp * per_rank, max_size=pp * per_rank).map(tuple)
    costs = StageCosts(draw(each), draw(each), draw(each), draw(st.floats(0, 2)), draw(each), draw(st.floats(0, 1)))
    return pp, per_rank, costs, simulate(schedule, pp, per_rank, micro_batches, costs)


def ends(run):
    """{(is forward, stage, micro-batch): second at which it was there}"""
    return {
        (each.action.kind is Kind.FORWARD, each.action.stage, each.action.micro_batch): each.end_s
        for rank in run.ranks
        for each in rank.intervals
        if each.action.kind is not Kind.BACKWARD_WEIGHT
    }


def arrivals(action, done, owners, p2p_s):
    """When each input of an action was there."""
    stage, last = action.stage, len(owners) - 1
    sources = {
        Kind.FORWARD: [(True, stage - 1)] if stage else [],
        Kind.BACKWARD_WEIGHT: [(False, stage)],
    }.get(action.kind, [(True, stage), *([(False, stage + 1)] if stage < last else [])])
    return [
        done[is_forward, other, action.micro_batch] + (p2p_s if owners[other] != owners[stage] else 0)
        for is_forward, other in sources
    ]


@settings(max_examples=40, deadline=None)
@given(runs())
def test_every_action_runs_once_as_soon_as_rank_and_inputs_are_free(case):
    pp, per_rank, costs, run = case
    owners = {stage: rank for rank, held in enumerate(rank_stages(run.schedule, pp, per_rank)) for stage in held}
    done, seen = ends(run), set()
    for rank in run.ranks:
        free = 0.0
        for each in rank.intervals:
            inputs = arrivals(each.action, done, owners, costs.p2p_s)
            assert owners[each.action.stage] == rank.pp_rank
            assert each.start_s >= max([free, *inputs])
            if not each.action.paired:
                assert each.start_s == max([free, *inputs])
            assert each.end_s - each.start_s == pytest.approx(costs.seconds(each.action))
            halves = "IW" if each.action.kind is Kind.BACKWARD else each.action.kind
            seen |= {(half, each.action.stage, each.action.micro_batch) for half in halves}
            free = each.end_s
    assert len(seen) == 3 * pp * per_rank * run.micro_batches


@settings(max_examples=40, deadline=None)
@given(runs())
def test_makespan_is_at_least_one_micro_batchs_way_and_any_ranks_work(case):
    pp, per_rank, costs, run = case
    stages = rank_stages(run.schedule, pp, per_rank)
    owners = {stage: rank for rank, held in enumerate(stages) for stage in held}
    hops = sum(owners[stage] != owners[stage + 1] for stage in range(pp * per_rank - 1))
    way = sum(costs.forward_s) + sum(costs.input_s) + 2 * hops * costs.p2p_s
    assert run.makespan_s >= way - 1e-9
    for rank, held in zip(run.ranks, stages, strict=True):
        work = sum(costs.forward_s[each] + costs.input_s[each] + costs.weight_s[each] for each in held)
        assert rank.busy_s == pytest.approx(run.micro_batches * work)
        idle = sum(end - start for start, end in rank.idle(run.makespan_s))
        assert idle + rank.busy_s == pytest.approx(run.makespan_s)
    assert 0 <= run.bubble_fraction < 1
    assert run.bubble_over_ideal == pytest.approx(run.bubble_fraction / (1 - run.bubble_fraction), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(runs())
def test_activations_are_all_given_back_and_never_less_than_none(case):
    _, _, costs, run = case
    for rank in run.ranks:
        assert [second for second, _ in rank.memory] == sorted(second for second, _ in rank.memory)
        assert all(held >= -1e-9 for _, held in rank.memory)
        assert rank.memory[-1][1] == pytest.approx(0, abs=1e-9)
        assert 0 < rank.peak_bytes <= run.micro_batches * sum(costs.activation_bytes) + 1e-9


@settings(max_examples=30, deadline=None)
@given(runs(), st.floats(0, 2), st.floats(0, 1))
def test_slower_hops_never_help_and_overlap_never_harms(case, more, saving):
    pp, per_rank, costs, run = case
    slower = dataclasses.replace(costs, p2p_s=costs.p2p_s + more)
    assert simulate(run.schedule, pp, per_rank, run.micro_batches, slower).makespan_s >= run.makespan_s - 1e-9
    saved = dataclasses.replace(costs, pair_saving=saving)
    assert simulate(run.schedule, pp, per_rank, run.micro_batches, saved).makespan_s <= run.makespan_s + 1e-9


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "rounds"), [(2, 1), (4, 2), (4, 6), (8, 4)])
@pytest.mark.parametrize(("forward", "inputs", "weight"), [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75)])
def test_bubble_of_even_stages_is_the_papers(schedule, pp, rounds, forward, inputs, weight):
    if schedule == "zbv" and inputs != weight:
        return  # the papers give none
    per_ranks = (1,) if schedule in ("gpipe", "1f1b") else (2,) if schedule in V_SCHEDULES else (1, 2, 4)
    micro_batches = pp * rounds * (2 if schedule in V_SCHEDULES else 1)
    for per_rank in per_ranks:
        costs = StageCosts.even(pp * per_rank, forward / per_rank, inputs / per_rank, weight / per_rank)
        run = simulate(schedule, pp, per_rank, micro_batches, costs)
        bubble = run.makespan_s - micro_batches * (forward + inputs + weight)
        formula = bubble_by_formula(schedule, pp, per_rank, forward, inputs, weight)
        if schedule == "dualpipev" and inputs != weight:
            assert 0.8 * formula < bubble < formula
        else:
            assert bubble == pytest.approx(formula)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("forward", "inputs", "weight"), [(1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (1.0, 2.3, 0.7)])
def test_bubble_left_holds_for_other_ranks_and_numbers_of_micro_batches(schedule, forward, inputs, weight):
    per_rank = 1 if schedule in ("gpipe", "1f1b") else 2
    for pp, micro_batches in ((2, 8), (4, 24), (8, 32)):
        left = bubble_left(schedule, pp, per_rank, forward, inputs, weight)
        assert 0 < left <= 1
        costs = StageCosts.even(pp * per_rank, *(each / per_rank for each in (forward, inputs, weight)))
        run = simulate(schedule, pp, per_rank, micro_batches, costs)
        plain = (pp - 1) * (forward + inputs + weight)
        assert run.makespan_s - run.busy_s / pp == pytest.approx(left * plain, rel=0.1)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zbv_with_even_parts_leaves_no_gap_between_a_ranks_first_and_last_action(pp):
    run = simulate("zbv", pp, 2, 4 * pp, StageCosts.even(2 * pp, 1.0, 1.0, 1.0))
    for rank in run.ranks:
        assert rank.intervals[-1].end_s - rank.intervals[0].start_s == pytest.approx(rank.busy_s)


def test_pairs_that_overlap_shorten_dualpipev_by_what_they_save():
    costs = StageCosts.even(8, 1.0, 1.0, 1.0)
    alone = simulate("dualpipev", 4, 2, 16, costs)
    paired = simulate("dualpipev", 4, 2, 16, dataclasses.replace(costs, pair_saving=0.2))
    assert 0.75 * alone.makespan_s < paired.makespan_s < alone.makespan_s


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "looped_bfs"])
def test_most_passes_in_flight_are_what_the_memory_of_a_rank_counts(schedule, pp):
    per_ranks = (1,) if schedule in ("gpipe", "1f1b") else (2,) if schedule in ("zbv", "dualpipev") else (2, 3)
    for per_rank in per_ranks:
        run = simulate(schedule, pp, per_rank, 4 * pp, StageCosts.even(pp * per_rank, 1.0, 1.0, 1.0))
        shape = RunShape(seq_len=8, global_batch_size=4 * pp, schedule=schedule, stages_per_rank=per_rank)
        for rank in run.ranks:
            assert rank.peak_bytes == stage_passes_in_flight(Layout(pp=pp), shape, rank.pp_rank)


def test_a_first_stage_that_is_whole_does_both_halves_with_its_weights():
    whole = dataclasses.replace(StageCosts.even(8, 1.0, 1.25, 0.75), first_is_whole=True)
    run = simulate("zbv", 4, 2, 8, whole)
    taken = {each.action.kind: each.end_s - each.start_s for each in run.ranks[0].intervals if each.action.stage == 0}
    assert taken == pytest.approx({Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 0.0, Kind.BACKWARD_WEIGHT: 2.0})
    assert run.busy_s == pytest.approx(8 * 8 * 3.0)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(PhalanxError, match="one for each of the 4 stages"):
        simulate("1f1b", 4, 1, 8, StageCosts.even(3, 1, 1, 1))
