"""Hangs, stragglers and GPU faults."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.api.agent.v1 import record_pb2 as pb
from phalanx.gang.sections import Durations
from phalanx.monitor.attention import AttentiveClock
from phalanx.monitor.ranks import RankTable
from phalanx.monitor.rules import Kind
from phalanx.monitor.rules.gpu import FaultCounts, GpuReading, gpu_faults
from phalanx.monitor.rules.hang import HangRule, InSection, hanging
from phalanx.monitor.rules.straggler import StragglerRule, stragglers

HANG, SLOW = HangRule(), StragglerRule()
PAST = {"step": Durations.of([1.0] * 100)}


def at(rank, step=5, num=1, arrived_s=0.0, deadline_s=120.0, name="step", node="a", waited_s=0.0):
    return InSection(rank, name, step, num, arrived_s, 0.0, deadline_s, node, waited_s)


def test_hang_of_a_rank_left_behind_is_its_own_and_not_that_of_those_who_wait():
    verdict = hanging(HANG, 3, [at(0, step=6), at(1, step=6), at(2, step=5)], PAST, 16.0)
    assert verdict is not None
    assert (verdict.kind, verdict.rank, verdict.first_step, verdict.attempt) == (Kind.HANG, 2, 5, 3)
    assert "rank 2 is in section 'step' of step 5 for 16.0 s (limit 14.5 s)" in verdict.message


def test_hang_of_all_ranks_names_none():
    verdict = hanging(HANG, 1, [at(rank) for rank in range(4)], PAST, 16.0)
    assert verdict is not None and verdict.rank is None
    assert "4 of 4 ranks" in verdict.message


def test_hang_limit_is_three_times_the_99th_percentile_once_that_is_longer():
    past = {"step": Durations.of([20.0] * 100)}
    assert hanging(HANG, 1, [at(0)], past, 60.0) is None
    assert hanging(HANG, 1, [at(0)], past, 72.0) is not None


def test_hang_limit_is_the_fixed_deadline_before_enough_is_known():
    assert hanging(HANG, 1, [at(0)], {}, 120.0) is None
    assert hanging(HANG, 1, [at(0)], {}, 126.0) is not None


def test_hang_in_a_section_that_is_not_learned_takes_its_fixed_deadline():
    past = {"save": Durations.of([1.0] * 100)}
    assert hanging(HANG, 1, [at(0, name="save", deadline_s=600.0)], past, 500.0) is None


def test_hang_without_a_deadline_is_none():
    assert hanging(HANG, 1, [at(0, deadline_s=None)], PAST, 1e9) is None


def test_hang_is_not_told_while_a_node_is_not_heard():
    ranks = [at(0, node="a"), at(1, node="b")]
    assert hanging(HANG, 1, ranks, PAST, 100.0, {"b"}) is None
    assert hanging(HANG, 1, ranks, PAST, 100.0, {"c"}) is not None


def test_hang_of_one_who_waited_counts_from_when_nobody_was_behind():
    assert hanging(HANG, 1, [at(0, waited_s=90.0), at(1, arrived_s=90.0)], PAST, 100.0) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.floats(0, 100)), min_size=1, max_size=8))
def test_hang_names_only_ranks_least_far(ranks):
    sections = [at(rank, step, num, arrived) for rank, (step, num, arrived) in enumerate(ranks)]
    verdict = hanging(HANG, 1, sections, PAST, 150.0)
    least = min(each.distance for each in sections)
    if verdict is not None and verdict.rank is not None:
        assert sections[verdict.rank].distance == least
    if verdict is None:
        assert all(each.own_time_s(150.0) <= 15.0 for each in sections if each.distance == least)


def record(rank, since_start_s=0.0, **event):
    return pb.Record(rank=rank, attempt=1, since_start_s=since_start_s, **event)


def enter(table, rank, step, now_s, since_start_s, name="step", deadline_s=120.0):
    table.observe(1, record(rank, since_start_s, phase=pb.Phase(name=name, step=step, deadline_s=deadline_s)), now_s)


def table_of(num_steps=40, step_s=2.0):
    """Two ranks that did `num_steps` steps, whose records all arrived at the same moment, 0."""
    table = RankTable()
    table.place({0: "a", 1: "b"})
    for step in range(1, num_steps + 1):
        for rank in range(2):
            enter(table, rank, step, 0.0, step * step_s)
    return table


def test_table_learns_from_the_ranks_own_clock_and_not_from_when_records_arrive():
    table = table_of(step_s=20.0)
    assert table.hang(1, 60.0, frozenset()) is None, "records that arrived at once don't make steps look short"
    assert table.hang(1, 75.0, frozenset()) is not None


def test_table_long_save_of_one_rank_is_no_hang_of_its_peers():
    table = table_of(step_s=1.0)
    enter(table, 0, 40, 0.0, 41.0, name="save", deadline_s=600.0)
    enter(table, 0, 41, 0.0, 41.0)  # rank 0 is ahead, rank 1 is in its save
    enter(table, 1, 40, 0.0, 41.0, name="save", deadline_s=600.0)
    for now_s in range(0, 300, 1):
        assert table.hang(1, float(now_s), frozenset()) is None
    enter(table, 1, 41, 300.0, 341.0)
    assert table.hang(1, 310.0, frozenset()) is None, "rank 0 waited until now"
    assert table.hang(1, 316.0, frozenset()) is not None


def test_table_time_of_a_node_that_was_away_does_not_count():
    table = table_of(step_s=1.0)
    table.pause(frozenset({"a", "b"}), 300.0)
    assert table.hang(1, 310.0, frozenset()) is None
    assert table.hang(1, 316.0, frozenset()) is not None


def test_table_rank_that_ended_hangs_no_more():
    table = table_of(step_s=1.0)
    for rank in range(2):
        table.observe(1, record(rank, ended=pb.Ended(exit_code=0)), 0.0)
    assert table.hang(1, 1e6, frozenset()) is None
    assert not any(view.is_alive for view in table.views(0.0))


def test_attentive_clock_stands_still_while_nothing_is_heard_and_makes_up_for_no_pause():
    now = [0.0]
    clock = AttentiveClock(lambda: now[0])
    for passed, listening, shown in ((0.5, True, 0.5), (100.0, False, 0.5), (0.25, True, 0.75), (60.0, True, 1.75)):
        now[0] += passed
        assert clock.tick(listening) == pytest.approx(shown)


def busy(num_ranks, slow=(), by=2.0, num=20):
    return {rank: [0.4 * (by if rank in slow else 1.0)] * num for rank in range(num_ranks)}


def test_straggler_is_a_rank_above_one_and_a_half_times_the_median():
    found = stragglers(SLOW, 2, 100, busy(8, slow=(3,)), {3: "node-b"})
    assert [(each.rank, each.node, each.attempt) for each in found] == [(3, "node-b", 2)]
    assert stragglers(SLOW, 2, 100, busy(8, slow=(3,), by=1.4), {}) == ()


def test_straggler_is_told_once_for_a_rank_in_an_attempt():
    first, later = (stragglers(SLOW, 2, step, busy(8, slow=(3,)), {})[0] for step in (100, 900))
    assert first.id("j") == later.id("j")


def test_straggler_of_two_ranks_is_the_slower_one():
    assert [each.rank for each in stragglers(SLOW, 1, 50, busy(2, slow=(1,)), {})] == [1]


def test_straggler_below_the_noise_floor_is_none():
    assert stragglers(SLOW, 1, 50, {0: [0.001] * 20, 1: [0.001] * 20, 2: [0.004] * 20}, {}) == ()


def test_straggler_before_enough_steps_is_none():
    assert stragglers(SLOW, 1, 5, busy(4, slow=(1,), num=19), {}) == ()


@given(st.integers(2, 64), st.floats(0.01, 10), st.floats(1.0, 1.45))
def test_ranks_within_the_factor_never_straggle(num_ranks, base_s, factor):
    times = {rank: [base_s * (1 + (factor - 1) * rank / num_ranks)] * 20 for rank in range(num_ranks)}
    assert stragglers(SLOW, 1, 50, times, {}) == ()


def reading(**figures):
    return GpuReading("node-a", 3, "GPU-1", **figures)


def test_gpu_old_xid_of_a_gpu_never_seen_is_no_news():
    counts, found = gpu_faults(None, reading(xid=79, ecc_uncorrectable=4))
    assert counts == FaultCounts(79, 4) and found == ()


def test_gpu_xid_that_changes_is_told_once():
    counts, found = gpu_faults(FaultCounts(), reading(xid=79))
    assert len(found) == 1 and "XID 79" in found[0].message
    assert gpu_faults(counts, reading(xid=79))[1] == ()


def test_gpu_xid_of_an_application_says_so():
    assert "application" in gpu_faults(FaultCounts(), reading(xid=31))[1][0].message


def test_gpu_uncorrectable_errors_are_told_as_they_grow():
    counts, found = gpu_faults(FaultCounts(0, 2), reading(ecc_uncorrectable=5))
    assert "5 uncorrectable" in found[0].message and "3 of them new" in found[0].message
    assert gpu_faults(counts, reading(ecc_uncorrectable=5))[1] == ()


def test_gpu_counter_that_began_anew_is_no_fault_and_counts_from_there():
    counts, found = gpu_faults(FaultCounts(0, 5), reading(ecc_uncorrectable=0))
    assert found == ()
    assert len(gpu_faults(counts, reading(ecc_uncorrectable=1))[1]) == 1


def test_gpu_absent_figures_change_nothing():
    assert gpu_faults(FaultCounts(79, 4), reading()) == (FaultCounts(79, 4), ())
