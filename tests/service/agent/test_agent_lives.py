"""Agents that lose train, are killed, are told to end, or hold what is no longer wanted."""

from __future__ import annotations

import os
import signal
import time

from agent_kit import ENTRY, is_alive, wait_until

from phalanx.agent.agent import Agent
from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1 import record_pb2


def test_agent_lost_stream_changes_nothing_for_the_gang_and_nothing_is_lost(world, agent):
    pids = world.start_gang("chatter", pause_s=0.005).gang_started.pids
    wait_until(lambda: len(world.train.records("progress")) > 50, 10.0, "steps")
    for number in range(3):
        world.train.drop_stream()
        wait_until(lambda number=number: len(world.train.hellos) == number + 2, 10.0, "another hello")
        so_far = len(world.train.records("progress"))
        wait_until(lambda so_far=so_far: len(world.train.records("progress")) > so_far + 20, 10.0, "more steps")
    assert all(map(is_alive, pids))
    (held,) = world.train.hellos[-1].gangs
    assert (held.attempt, held.ranks, held.state) == (1, [0, 1], pb.GANG_STATE_RUNNING)
    assert len({hello.instance_id for hello in world.train.hellos}) == 1
    steps = [each.step for each in world.train.records("progress")]
    assert len(world.train.records("committed")) == 1
    for rank_steps in (steps,):
        assert sorted(set(rank_steps)) == list(range(1, max(steps) + 1))


def test_agent_reports_without_acknowledgement_come_again_on_the_next_stream(world, agent):
    world.train.acknowledges = False
    world.start_gang("train", steps=5)
    world.train.wait_ended()
    first = {report.number: report for report in world.train.reports}
    world.train.reports.clear()
    world.train.acknowledges = True
    world.train.drop_stream()
    world.train.wait_ended()
    (held,) = world.train.hellos[-1].gangs
    assert (held.attempt, held.state) == (1, pb.GANG_STATE_FINISHED)
    assert {report.number: report for report in world.train.reports} == first
    wait_until(lambda: not agent.held(), 5.0, "the acknowledged end is forgotten")


def test_agent_train_away_for_long_costs_old_progress_alone(world):
    with Agent(world.agent_config(max_waiting_records=100, stop_grace_s=0.2), entry=ENTRY, preload=()):
        wait_until(lambda: world.train.hellos, 10.0, "the agent's hello")
        world.start_gang("chatter", pause_s=0.001)
        wait_until(lambda: world.train.records("progress"), 10.0, "steps")
        world.train.acknowledges = False
        world.stop("train")
        time_out_s = time.monotonic() + 3.0
        wait_until(lambda: time.monotonic() > time_out_s, 5.0, "records pile up")
        world.train.acknowledges = True
        world.start("train")
        wait_until(lambda: world.train.heartbeats[-1].num_dropped_records > 0, 15.0, "told what was dropped")
        world.train.ask(end_gang=pb.EndGang(why="test"))
        world.train.wait_ended()
        steps = {}
        for report in sorted(world.train.reports, key=lambda report: report.number):
            for record in report.records.records:
                if record.WhichOneof("event") == "progress":
                    steps.setdefault(record.rank, set()).add(record.progress.step)
        num_lost = sum(max(told) - len(told) for told in steps.values())
        wait_until(lambda: world.train.heartbeats[-1].num_dropped_records >= num_lost > 0, 5.0, "the exact count")
        assert len(world.train.records("committed")) == 1
        assert len(world.train.records("ended")) == 2


def test_agent_repeated_order_after_a_lost_stream_is_answered_on_the_next_one(world, agent):
    order = world.gang_order("wait_deaf")
    first = world.train.ask(order_id="same", start_gang=order)
    world.train.answers.clear()
    world.train.drop_stream()
    wait_until(lambda: len(world.train.hellos) == 2, 10.0, "another hello")
    assert world.train.ask(order_id="same", start_gang=order) == first


def test_agent_rank_speaks_to_data_and_checkpoint_with_the_attempts_own_token(world, agent):
    order = world.gang_order("call_agent")
    order.parent_attempt, order.parent_step = 3, 12
    order.token = world.token(4)
    world.train.ask(attempt=4, start_gang=order)
    wait_until(lambda: world.train.records("progress", 4), 15.0, "rank 0 has its plan and its commit")
    assert world.data.steps == [12, 16]
    assert world.checkpoint.calls == ["begin 20", "commit 20"]
    assert {(each.job, each.attempt) for each in (*world.data.callers, *world.checkpoint.callers)} == {("tiny", 4)}
    assert [each.step for each in world.train.records("opened", 4)] == [12]
    assert world.train.ask(attempt=4, give_orders=pb.GiveOrders(stop=True)).HasField("done")
    ended = world.train.wait_ended(4)
    assert (ended.state, ended.committed_step) == (pb.GANG_STATE_STOPPED, 20)
    assert [(each.attempt, each.step) for each in world.train.records("committed", 4)] == [(4, 20)]


def test_agent_data_away_is_waited_for_and_the_gang_goes_on(world, agent):
    world.start_gang("renew_for_ever", world_size=1)
    wait_until(lambda: len(world.data.steps) > 3, 15.0, "plans")
    world.stop("data")
    before = len(world.data.steps)
    left_s = time.monotonic() + 2.0
    wait_until(lambda: time.monotonic() > left_s, 3.0, "two seconds without data")
    world.start("data")
    wait_until(lambda: len(world.data.steps) > before + 3, 15.0, "plans again")
    assert world.train.ended() is None
    assert world.data.steps == list(range(len(world.data.steps)))


def test_agent_attempt_that_data_calls_superseded_ends_and_says_so(world, agent):
    pids = world.start_gang("renew_for_ever", world_size=1).gang_started.pids
    wait_until(lambda: len(world.data.steps) > 3, 15.0, "plans")
    world.data.newest = 2
    ended = world.train.wait_ended(within_s=10.0)
    assert (ended.state, ended.cause.kind) == (pb.GANG_STATE_STOPPED, record_pb2.CAUSE_KIND_SUPERSEDED)
    assert not any(map(is_alive, pids))


def test_agent_order_to_end_a_superseded_gang_says_so(world, agent):
    world.start_gang("wait_deaf")
    assert world.train.ask(end_gang=pb.EndGang(why="attempt 2 runs elsewhere", superseded=True)).HasField("done")
    ended = world.train.wait_ended()
    assert (ended.state, ended.cause.kind) == (pb.GANG_STATE_STOPPED, record_pb2.CAUSE_KIND_SUPERSEDED)
    assert "attempt 2 runs elsewhere" in ended.cause.message


def test_agent_gang_that_is_ended_before_it_has_started_never_lives(world):
    with Agent(world.agent_config(stop_grace_s=0.2), entry=ENTRY, preload=("agent_slow_module",)):
        wait_until(lambda: world.train.hellos, 10.0, "the agent's hello")
        start = world.train.send(start_gang=world.gang_order("wait_deaf"))
        wait_until(lambda: world.train.orders[world.train.hellos[-1].node_id].empty(), 10.0, "the order is on its way")
        assert world.train.ask(end_gang=pb.EndGang(why="no longer wanted")).HasField("done")
        assert "before it had started" in world.train.answer_of(start).failure.cause.message
        again = world.train.ask(order_id=start, start_gang=world.gang_order("wait_deaf"))
        assert again.HasField("failure")
        assert world.start_gang("wait_deaf").HasField("gang_started")


def test_agent_sigkill_takes_every_rank_along_and_its_successor_holds_nothing(world, start_agent):
    first = start_agent()
    pids = world.start_gang("wait_deaf", world_size=4).gang_started.pids
    wait_until(lambda: len(world.train.records("phase")) >= 8, 10.0, "all ranks wait")
    processes = first.descendants()
    assert set(pids) < set(processes)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    wait_until(lambda: not any(map(is_alive, processes)), 5.0, "ranks and fork servers are gone")
    start_agent()
    assert world.train.hellos[0].node_id == world.train.hellos[-1].node_id
    assert world.train.hellos[0].instance_id != world.train.hellos[-1].instance_id
    assert not world.train.hellos[-1].gangs
    assert world.start_gang("train", attempt=2, steps=1).HasField("gang_started")


def test_agent_sigterm_lets_ranks_commit_and_tells_it_before_it_ends(world, start_agent):
    process = start_agent().process
    pids = world.start_gang("wait").gang_started.pids
    wait_until(lambda: len(world.train.records("phase")) >= 4, 10.0, "all ranks wait")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not any(map(is_alive, pids))
    ended = world.train.ended()
    assert (ended.state, ended.committed_step) == (pb.GANG_STATE_STOPPED, 1)


def test_agent_sigterm_ends_deaf_ranks_after_the_grace(world, start_agent):
    process = start_agent(stop_grace_s=0.5).process
    pids = world.start_gang("wait_deaf").gang_started.pids
    wait_until(lambda: len(world.train.records("phase")) >= 4, 10.0, "all ranks wait")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not any(map(is_alive, pids))


def test_agent_that_ends_begins_nothing_and_calls_nothing_failed(world, start_agent):
    agent = start_agent(stop_grace_s=2.0)
    world.start_gang("wait_deaf")
    wait_until(lambda: len(world.train.records("phase")) >= 4, 10.0, "all ranks wait")
    agent.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "told to end" in agent.log.read_text(), 10.0, "the agent ends")
    asked = [
        world.train.send(attempt=2, start_gang=world.gang_order("train", attempt=2)),
        world.train.send(attempt=2, prepare=pb.Prepare(spec_json="{}", world_size=2)),
    ]
    assert agent.process.wait(30) == 0
    assert not [each for each in world.train.answers if each.order_id in asked]
    assert world.train.ended(2) is None and not list(world.folder.rglob("attempt-2"))


def test_agent_that_ends_says_so_before_the_end_of_its_gangs(world):
    with Agent(world.agent_config(stop_grace_s=2.0, heartbeat_s=600.0), entry=ENTRY, preload=()):
        wait_until(lambda: world.train.hellos, 10.0, "the agent's hello")
        world.start_gang("wait")
        wait_until(lambda: len(world.train.records("phase")) >= 2, 10.0, "all ranks wait")
        assert not world.train.heartbeats
    assert world.train.ended() is not None
    assert [each.is_ending for each in world.train.heartbeats] == [True]


def test_agent_sigterm_while_train_is_away_ends_all_the_same(world, start_agent):
    process = start_agent(stop_grace_s=0.5).process
    pids = world.start_gang("wait").gang_started.pids
    world.stop("train")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not any(map(is_alive, pids))
