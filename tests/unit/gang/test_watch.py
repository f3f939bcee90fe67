"""Hangs: who is late, and whom the others wait for."""

from phalanx.gang.order import Event
from phalanx.gang.sections import Durations, Rule
from phalanx.gang.watch import Watch, main_stack, waits_in_collective

COLLECTIVE = """Thread 0x00007f (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/env/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 7 in step
"""
FUNCTIONAL = """Current thread 0x00007f (most recent call first):
  File "/env/torch/_ops.py", line 1209 in __call__
  File "/env/torch/distributed/_functional_collectives.py", line 135 in wait_tensor
  File "/home/me/train.py", line 7 in step
"""
ASLEEP = """Thread 0x00007e (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in wait
Thread 0x00007f (most recent call first):
  File "/home/me/model.py", line 40 in a_long_nap
  File "/env/torch/nn/modules/module.py", line 1751 in _call_impl
  File "/env/torch/distributed/pipelining/stage.py", line 700 in forward_one_chunk
  File "/home/me/train.py", line 7 in step
"""


def phase(rank, step, at_s, deadline_s=10.0, name="step"):
    return Event(rank, "phase", {"name": name, "step": step, "deadline_s": deadline_s}, at_s)


def watch_of(*events, world_size=3, off=False):
    watch = Watch(world_size, off=off)
    for event in events:
        watch.observe(event)
    return watch


def test_late_rank_past_its_own_deadline_only():
    watch = watch_of(phase(0, 1, 100.0, 10.0), phase(1, 1, 100.0, 30.0), phase(2, 1, 100.0, None))
    assert watch.late(109.0) == ()
    assert watch.late(111.0) == (0,)
    assert watch.late(131.0) == (0, 1)


def test_late_rank_that_never_comes_out_of_its_import_is_late():
    watch = watch_of(Event(1, "entry", {"deadline_s": 5.0}, 100.0))
    assert watch.late(106.0) == (1,)
    assert "import" in watch_of(Event(0, "entry", {"deadline_s": 5.0}, 1.0), world_size=1).cause(9.0, {}).message


def test_late_rank_that_entered_the_next_phase_is_not_late():
    watch = watch_of(phase(0, 1, 100.0), phase(0, 2, 109.0))
    assert watch.late(115.0) == ()


def save_beside_steps(*more):
    """Rank 0 saves step 1 (600 s allowed) while its peers are in step 2 already (10 s allowed)."""
    saves = [phase(rank, 1, 100.0, 600.0, "save") for rank in range(3)]
    return watch_of(*saves, phase(1, 2, 101.0), phase(2, 2, 101.0), *more)


def test_late_rank_that_waits_for_a_slow_but_honest_save_is_not_late():
    assert save_beside_steps().late(699.0) == ()


def test_late_rank_that_waited_has_its_own_time_from_the_moment_in_which_the_other_came():
    watch = save_beside_steps(phase(0, 2, 400.0))
    assert watch.late(409.0) == ()
    assert watch.late(411.0) == (0, 1, 2)


def test_late_rank_that_the_other_has_passed_is_not_late_at_once():
    watch = save_beside_steps(phase(0, 2, 400.0), phase(0, 3, 401.0), phase(2, 3, 401.0))
    assert watch.late(409.0) == ()
    assert watch.late(410.5) == (1,)


def test_late_save_past_its_own_deadline_is_late_and_the_culprit():
    watch = save_beside_steps()
    assert watch.late(701.0) == (0, 1, 2)
    assert watch.cause(701.0, {0: COLLECTIVE, 1: COLLECTIVE, 2: COLLECTIVE}).rank == 0


def test_late_rank_behind_excuses_nobody_once_it_ended_or_without_a_deadline():
    assert save_beside_steps(Event(0, "exit", {}, 102.0)).late(112.0) == (1, 2)
    assert watch_of(phase(0, 1, 100.0), world_size=2).late(111.0) == (0,)


def test_late_rank_that_ended_is_not_late():
    watch = watch_of(phase(0, 1, 100.0), Event(0, "exit", {}, 101.0))
    assert watch.late(200.0) == ()


def test_late_with_deadlines_off_names_nobody():
    assert watch_of(phase(0, 1, 100.0), off=True).late(1e9) == ()


def test_cause_names_the_rank_least_far_even_inside_a_collective():
    watch = watch_of(phase(0, 5, 1.0), phase(1, 4, 1.0), phase(2, 5, 1.0))
    cause = watch.cause(20.0, {0: ASLEEP, 1: COLLECTIVE, 2: COLLECTIVE})
    assert (cause.kind, cause.rank) == ("hang", 1)


def test_cause_among_ranks_equally_far_names_the_one_outside_a_collective():
    watch = watch_of(*(phase(rank, 5, 1.0) for rank in range(3)))
    cause = watch.cause(20.0, {0: COLLECTIVE, 1: FUNCTIONAL, 2: ASLEEP})
    assert cause.rank == 2
    assert "a_long_nap" in cause.where and "a_long_nap" in cause.detail
    assert "step 5" in cause.message and "10 s" in cause.message


def test_cause_rank_without_a_stack_is_the_culprit_when_the_others_wait():
    watch = watch_of(*(phase(rank, 5, 1.0) for rank in range(3)))
    cause = watch.cause(20.0, {0: COLLECTIVE, 2: COLLECTIVE})
    assert cause.rank == 1
    assert "no stack" in cause.where


def test_cause_phase_without_a_step_keeps_the_step_before_it():
    events = [phase(0, 5, 1.0), phase(1, 5, 1.0), Event(1, "phase", {"name": "save", "deadline_s": 3}, 2.0)]
    cause = watch_of(*events, world_size=2).cause(20.0, {0: COLLECTIVE, 1: ASLEEP})
    assert cause.rank == 0


def test_main_stack_is_the_last_thread_of_the_last_dump():
    assert [frame.name for frame in main_stack(COLLECTIVE + ASLEEP)][:1] == ["a_long_nap"]


def test_waits_in_collective_of_a_user_function_inside_a_pipeline_is_false():
    assert not waits_in_collective(main_stack(ASLEEP))
    assert waits_in_collective(main_stack(FUNCTIONAL))
    assert not waits_in_collective(())


def learned_watch(num_steps, step_s, *, deadline_s=120.0, ranks=(0, 1), world_size=2, name="step"):
    """Ranks that have done `num_steps` steps of `step_s` each, in lockstep, and have begun the next."""
    watch = Watch(world_size, ranks=ranks, rule=Rule())
    for step in range(num_steps + 1):
        for rank in ranks:
            watch.observe(phase(rank, step, step * step_s, deadline_s, name))
    return watch, num_steps * step_s


def test_late_step_once_twenty_were_seen_has_a_learned_deadline():
    watch, now_s = learned_watch(30, 1.0)
    assert watch.late(now_s + 9.4) == ()
    assert watch.late(now_s + 9.6) == (0, 1)  # told within 10 s
    assert "learned from" in watch.cause(now_s + 11, {0: COLLECTIVE, 1: ASLEEP}).message


def test_late_step_of_which_too_few_were_seen_has_its_fixed_deadline():
    watch, now_s = learned_watch(5, 1.0)
    assert watch.late(now_s + 119.0) == ()
    assert watch.late(now_s + 121.0) == (0, 1)
    assert "learned" not in watch.cause(now_s + 121, {}).message


def test_late_slow_steps_are_given_three_times_their_own_length():
    watch, now_s = learned_watch(30, 8.0)
    assert watch.late(now_s + 22.7) == ()
    assert watch.late(now_s + 23.5) == (0, 1)  # told within 24 s


def test_late_learned_deadline_is_never_beyond_the_fixed_one():
    watch, now_s = learned_watch(30, 8.0, deadline_s=20.0)
    assert watch.late(now_s + 20.1) == (0, 1)


def test_late_wait_for_a_plan_is_never_judged_by_what_it_took_before():
    watch, now_s = learned_watch(50, 0.01, name="plan")
    assert watch.late(now_s + 100.0) == ()


def test_late_steps_of_an_earlier_attempt_count():
    watch = Watch(1, rule=Rule(), past={"step": Durations.of([1.0] * 50)})
    watch.observe(phase(0, 1, 0.0, 120.0))
    assert watch.late(10.1) == (0,)


def test_past_without_a_rule_is_empty():
    assert not watch_of(phase(0, 1, 0.0), phase(0, 2, 1.0)).past


def half_of_four():
    """Ranks 2 and 3 of four, in a phase of 10 s; a save may take 60 s."""
    watch = Watch(4, ranks=(2, 3))
    for rank in (2, 3):
        for event in (phase(rank, 1, 90.0, 60.0, "save"), phase(rank, 2, 100.0, 10.0)):
            watch.observe(event)
    return watch


def test_verdict_all_in_a_collective_of_which_peers_live_elsewhere_waits_for_the_longest_phase_too():
    watch, stacks = half_of_four(), {2: COLLECTIVE, 3: COLLECTIVE}
    assert watch.late(111.0) == (2, 3)
    assert watch.verdict(111.0, stacks) is None
    assert watch.verdict(169.0, stacks) is None
    assert watch.verdict(171.0, stacks).is_waiting


def test_verdict_rank_outside_a_collective_is_the_culprit_at_once():
    cause = half_of_four().verdict(111.0, {2: COLLECTIVE, 3: ASLEEP})
    assert (cause.rank, cause.is_waiting) == (3, False)


def test_verdict_of_nobody_late_is_none():
    assert half_of_four().verdict(105.0, {2: COLLECTIVE, 3: ASLEEP}) is None


def test_verdict_of_a_whole_gang_blames_a_collective_at_once():
    watch = watch_of(phase(0, 1, 100.0), phase(1, 1, 100.0), world_size=2)
    assert watch.verdict(111.0, {0: COLLECTIVE, 1: COLLECTIVE}).is_waiting is False
