"""What an agent does when train orders it, told over real streams with real ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from agent_kit import ENTRY, JOB, is_alive, wait_until
from support.jobs import write_job

from phalanx.agent.agent import Agent
from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1 import record_pb2
from phalanx.spec import load_job
from phalanx.spec.job import plain


def test_agent_hello_tells_what_the_node_has(world, agent):
    hello = world.train.hellos[0]
    assert hello.node_id == agent.node_id and hello.instance_id
    assert (hello.inventory.num_slots, hello.inventory.address) == (8, "127.0.0.1")
    assert hello.inventory.num_cpus >= 1 and hello.inventory.memory_bytes > 2**20
    assert not hello.gangs
    wait_until(lambda: len(world.train.heartbeats) > 2, 5.0, "heartbeats")


def test_agent_gang_lives_and_all_that_it_says_arrives_once_and_in_order(world, agent):
    answer = world.start_gang("train", steps=300)
    assert len(answer.gang_started.pids) == 2 and answer.gang_started.rendezvous.startswith("127.0.0.1:")
    ended = world.train.wait_ended()
    assert (ended.state, ended.last_step, ended.committed_step) == (pb.GANG_STATE_FINISHED, 300, 300)
    assert not ended.HasField("cause")
    assert [each.step for each in world.train.records("progress")] == list(range(1, 301))
    assert len(world.train.records("committed")) == 1
    assert sorted(each.exit_code for each in world.train.records("ended")) == [0, 0]
    assert len(world.train.records("finished")) == 2
    numbers = [report.number for report in world.train.reports]
    assert numbers == list(range(1, len(numbers) + 1))
    wait_until(lambda: not agent.held(), 5.0, "the acknowledged end is forgotten")


def test_agent_repeated_order_is_answered_again_and_not_executed_again(world, agent):
    order = world.gang_order("wait")
    first = world.train.ask(order_id="same", start_gang=order)
    world.train.answers.clear()
    again = world.train.ask(order_id="same", start_gang=order)
    assert first == again
    other = world.train.ask(order_id="other", start_gang=order)
    assert other.failure.cause.kind == record_pb2.CAUSE_KIND_USER_ERROR
    assert all(map(is_alive, first.gang_started.pids))


def test_agent_rank_that_raises_is_named_with_its_node(world, agent):
    world.start_gang("raise_error")
    ended = world.train.wait_ended()
    assert (ended.state, ended.weight) == (pb.GANG_STATE_FAILED, 0)
    cause = ended.cause
    assert (cause.kind, cause.rank, cause.node_id) == (record_pb2.CAUSE_KIND_ERROR, 1, agent.node_id)
    assert cause.message == "ValueError: the loss went to the moon"
    (error,) = world.train.records("error")
    assert error.message == cause.message


def test_agent_sigkill_of_a_rank_is_told_within_5_s(world, agent):
    pids = world.start_gang("wait_deaf").gang_started.pids
    wait_until(lambda: len(world.train.records("phase")) >= 4, 10.0, "all ranks wait")
    os.kill(pids[1], signal.SIGKILL)
    ended = world.train.wait_ended(within_s=5.0)
    assert (ended.cause.kind, ended.cause.rank) == (record_pb2.CAUSE_KIND_PROCESS_DEATH, 1)
    assert ended.cause.signal == signal.SIGKILL
    assert not any(map(is_alive, pids))


def test_agent_fork_server_that_dies_takes_its_ranks_and_is_replaced(world, agent):
    pids = world.start_gang("wait_deaf").gang_started.pids
    wait_until(lambda: len(world.train.records("phase")) >= 4, 10.0, "all ranks wait")
    server = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(server, signal.SIGKILL)
    ended = world.train.wait_ended(within_s=5.0)
    assert ended.cause.kind == record_pb2.CAUSE_KIND_PROCESS_DEATH and not ended.cause.HasField("rank")
    assert not any(map(is_alive, pids))
    assert world.start_gang("wait_deaf", attempt=2).HasField("gang_started")


def test_agent_hang_past_its_fixed_deadline_is_found_with_its_stack(world, agent):
    world.start_gang("hang")
    ended = world.train.wait_ended(within_s=15.0)
    assert (ended.state, ended.cause.kind, ended.cause.rank) == (
        pb.GANG_STATE_FAILED,
        record_pb2.CAUSE_KIND_HANG,
        1,
    )
    assert "a_long_nap" in ended.cause.where and "hang" in ended.cause.detail


def test_agent_hang_after_quick_steps_is_found_long_before_the_fixed_deadline(world, agent):
    world.start_gang("hang_after_quick_steps")
    ended = world.train.wait_ended(within_s=30.0)
    assert ended.cause.kind == record_pb2.CAUSE_KIND_HANG
    assert "learned from" in ended.cause.message


def test_agent_hang_of_a_job_that_only_wants_to_be_told_ends_nothing(world, agent, tmp_path):
    path = write_job(tmp_path, "file:///nowhere", more='[recovery]\non_hang = "notify"\n')
    pids = world.start_gang("hang", job=plain(load_job(path))).gang_started.pids
    wait_until(lambda: world.train.records("error"), 15.0, "told of the hang")
    (told,) = world.train.records("error")
    assert (told.kind, told.rank) == (record_pb2.CAUSE_KIND_HANG, 1) and "a_long_nap" in told.where
    assert all(map(is_alive, pids)) and world.train.ended() is None


def test_agent_job_whose_name_leads_out_of_the_logs_is_refused(world, agent):
    answer = world.train.ask(job="projects/../jobs/x", read_log=pb.ReadLog(rank=0))
    assert answer.failure.cause.kind == record_pb2.CAUSE_KIND_USER_ERROR


def test_agent_end_with_grace_lets_ranks_commit(world, agent):
    world.start_gang("wait")
    wait_until(lambda: len(world.train.records("phase")) >= 4, 10.0, "all ranks wait")
    end = pb.EndGang(why="test")
    end.grace.FromSeconds(20)
    assert world.train.ask(end_gang=end).HasField("done")
    ended = world.train.wait_ended()
    assert (ended.state, ended.committed_step) == (pb.GANG_STATE_STOPPED, 1)
    assert not ended.HasField("cause")
    assert world.train.ask(end_gang=end).HasField("done")


def test_agent_end_without_grace_kills_at_once(world, agent):
    pids = world.start_gang("wait_deaf").gang_started.pids
    assert world.train.ask(end_gang=pb.EndGang(why="a peer died"), within_s=5.0).HasField("done")
    assert not any(map(is_alive, pids))
    ended = world.train.wait_ended()
    assert (ended.state, ended.weight) == (pb.GANG_STATE_STOPPED, 2)
    assert ended.cause.kind == record_pb2.CAUSE_KIND_INTERRUPTED


def test_agent_start_of_a_newer_attempt_ends_the_older_one(world, agent):
    old = world.start_gang("wait_deaf").gang_started.pids
    new = world.start_gang("wait_deaf", attempt=2).gang_started.pids
    assert not any(map(is_alive, old)) and all(map(is_alive, new))
    assert world.train.wait_ended(1).cause.kind == record_pb2.CAUSE_KIND_SUPERSEDED
    late = world.start_gang("wait_deaf", attempt=1)
    assert late.failure.cause.kind == record_pb2.CAUSE_KIND_SUPERSEDED
    assert all(map(is_alive, new))


def test_agent_code_of_another_digest_is_refused(world, agent):
    answer = world.start_gang("wait", digest="sha256:0")
    cause = answer.failure.cause
    assert cause.kind == record_pb2.CAUSE_KIND_USER_ERROR
    assert "sha256:0" in cause.message and "install the same version" in cause.message


def test_agent_more_ranks_than_slots_are_refused(world, agent):
    answer = world.start_gang("wait", world_size=9)
    assert "8 of 8 are free" in answer.failure.cause.message
    assert world.start_gang("train", steps=1, world_size=8).HasField("gang_started")


def test_agent_gang_of_another_node_is_told_where_rank_0_is(world, agent, tmp_path):
    fields = {"world_size": 4, "folder": str(tmp_path)}
    answer = world.start_gang("tell_environ", ranks=[2, 3], rendezvous="127.0.0.1:4242", **fields)
    assert answer.gang_started.rendezvous == "127.0.0.1:4242"
    assert world.train.wait_ended().state == pb.GANG_STATE_FINISHED
    told = (tmp_path / "3.environ").read_text().split()
    assert told == [
        "RANK=3",
        "LOCAL_RANK=1",
        "WORLD_SIZE=4",
        "LOCAL_WORLD_SIZE=2",
        "MASTER_ADDR=127.0.0.1",
        "MASTER_PORT=4242",
    ]


def test_agent_stacks_of_living_ranks(world, agent):
    world.start_gang("wait_deaf")
    wait_until(lambda: len(world.train.records("phase")) >= 4, 10.0, "all ranks wait")
    stacks = world.train.ask(take_stacks=pb.TakeStacks(ranks=[1])).stacks.stacks
    assert list(stacks) == [1] and "wait_deaf" in stacks[1]
    assert world.train.ask(attempt=7, take_stacks=pb.TakeStacks()).HasField("failure")


def test_agent_log_is_read_piece_by_piece_to_its_end(world, agent):
    world.start_gang("train", steps=1)
    world.train.wait_ended()
    wait_until(lambda: not agent.held(), 5.0, "the gang is gone")
    whole = world.train.ask(read_log=pb.ReadLog(rank=1)).log_chunk
    assert whole.data == b"rank 1 says goodbye\n" and whole.complete
    first = world.train.ask(read_log=pb.ReadLog(rank=1, max_bytes=7)).log_chunk
    assert (first.data, first.complete) == (b"rank 1 ", False)
    rest = world.train.ask(attempt=0, read_log=pb.ReadLog(rank=1, offset=7)).log_chunk
    assert (rest.data, rest.offset, rest.complete) == (b"says goodbye\n", 7, True)
    last = world.train.ask(read_log=pb.ReadLog(rank=1, offset=-4)).log_chunk
    assert (last.data, last.offset) == (b"bye\n", 16)


def test_agent_says_why_the_log_of_an_old_attempt_is_not_there(world):
    options = world.agent_config(stop_grace_s=0.5, max_log_bytes=1)
    with Agent(options, entry=ENTRY, preload=()) as agent:
        wait_until(lambda: world.train.hellos, 10.0, "the agent's hello")
        world.start_gang("train", steps=1)
        world.train.wait_ended()
        wait_until(lambda: not agent.held(), 5.0, "the gang is gone")
        assert world.train.ask(read_log=pb.ReadLog(rank=1)).log_chunk.data == b"rank 1 says goodbye\n"
        world.start_gang("wait_deaf", attempt=2)
        answer = world.train.ask(read_log=pb.ReadLog(rank=1))
        assert "attempt 1 had to go" in answer.failure.cause.message
        assert not world.train.ask(attempt=2, read_log=pb.ReadLog(rank=1)).HasField("failure")


def test_agent_log_of_a_living_rank_is_never_complete(world, agent):
    world.start_gang("wait_deaf")
    assert not world.train.ask(read_log=pb.ReadLog(rank=0)).log_chunk.complete


def test_agent_release_ends_all_of_a_job(world, agent):
    pids = world.start_gang("wait_deaf").gang_started.pids
    assert world.train.ask(attempt=0, release_job=pb.ReleaseJob()).HasField("done")
    assert not any(map(is_alive, pids))


def test_agent_prepare_tells_user_errors_as_such(world, agent):
    prepare = pb.Prepare(spec_json='{"job": {"name": "x"}, "model": {"nonsense": 1}}', world_size=2)
    cause = world.train.ask(attempt=0, prepare=prepare).failure.cause
    assert cause.kind == record_pb2.CAUSE_KIND_USER_ERROR
    assert "nonsense" in cause.message


def test_agent_prepare_past_its_deadline_is_an_answer(world, agent):
    answer = world.train.ask(attempt=0, deadline_s=0.05, prepare=pb.Prepare(spec_json="{}", world_size=2))
    assert "within 0.05 s" in answer.failure.cause.message


def test_agent_two_jobs_live_side_by_side(world, agent):
    one = world.start_gang("wait_deaf").gang_started.pids
    other_job = "projects/default/jobs/other"
    two = world.train.ask(job=other_job, start_gang=world.gang_order("wait_deaf")).gang_started.pids
    assert world.train.ask(job=JOB, end_gang=pb.EndGang(why="test")).HasField("done")
    assert not any(map(is_alive, one)) and all(map(is_alive, two))


def test_agent_orders_to_ranks_elsewhere_than_rank_0_come_as_signals(world, agent):
    world.start_gang("wait", world_size=3, ranks=[1, 2], rendezvous="127.0.0.1:1")
    wait_until(lambda: len(world.train.records("phase")) >= 4, 10.0, "all ranks wait")
    assert world.train.ask(give_orders=pb.GiveOrders(checkpoint=True)).HasField("done")
    wait_until(lambda: world.train.records("committed"), 5.0, "the commit")
    assert world.train.records("committed")[0].step == 7 and world.train.ended() is None
    assert world.train.ask(give_orders=pb.GiveOrders(stop=True)).HasField("done")
    assert world.train.wait_ended().state == pb.GANG_STATE_STOPPED
