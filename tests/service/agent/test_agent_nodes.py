"""One gang over two agents: rank 0's node opens the rendezvous, the other is told where; a death on one ends both."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from agent_kit import ENTRY, World, is_alive, wait_until

from phalanx.agent.agent import Agent
from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1 import record_pb2


@pytest.fixture
def two(world: World) -> Iterator[tuple[Agent, Agent]]:
    """Two nodes, told apart by their names."""
    configs = [world.agent_config(stop_grace_s=0.5, node=name, state_dir=str(world.folder / name)) for name in "ab"]
    with Agent(configs[0], entry=ENTRY, preload=()) as first, Agent(configs[1], entry=ENTRY, preload=()) as second:
        wait_until(lambda: len(world.train.streams) == 2, 10.0, "both nodes")
        yield first, second


def start_on_both(world: World, do: str, **arguments) -> dict[int, int]:
    """Ranks 0 and 2 on node a, 1 and 3 on node b; the pids by rank."""
    order = world.gang_order(do, world_size=4, ranks=[0, 2], **arguments)
    one = world.train.ask(node="a", start_gang=order).gang_started
    other_order = world.gang_order(do, world_size=4, ranks=[1, 3], rendezvous=one.rendezvous, **arguments)
    other = world.train.ask(node="b", start_gang=other_order).gang_started
    assert other.rendezvous == one.rendezvous
    return dict(zip([0, 2, 1, 3], [*one.pids, *other.pids], strict=True))


@pytest.mark.distributed
def test_gang_over_two_nodes_meets(world, two):
    start_on_both(world, "all_reduce")
    wait_until(lambda: len(world.train.ends()) == 2, 60.0, "both ends")
    assert {each.state for each in world.train.ends()} == {pb.GANG_STATE_FINISHED}
    assert {each.step for each in world.train.records("finished")} == {6}


@pytest.mark.distributed
def test_gang_over_two_nodes_death_on_one_is_told_by_it_with_the_least_weight(world, two):
    pids = start_on_both(world, "all_reduce_for_ever")
    wait_until(lambda: sum(each.name == "step" for each in world.train.records("phase")) == 4, 60.0, "all ranks met")
    os.kill(pids[3], signal.SIGKILL)
    wait_until(lambda: len(world.train.ends()) == 2, 10.0, "both ends")
    assert not any(map(is_alive, pids.values()))
    told = sorted(world.train.ends(), key=lambda each: each.weight)
    assert (told[0].cause.node_id, told[0].cause.rank, told[0].weight) == ("b", 3, 0)
    assert told[0].cause.kind == record_pb2.CAUSE_KIND_PROCESS_DEATH
    assert (told[1].cause.node_id, told[1].weight) == ("a", 2)


def test_gang_over_two_nodes_end_of_one_ends_the_other_as_soon_as_train_says_so(world, two):
    pids = start_on_both(world, "wait_deaf")
    wait_until(lambda: len(world.train.records("phase")) >= 8, 10.0, "all ranks wait")
    os.kill(pids[1], signal.SIGKILL)
    world.train.wait_ended(within_s=5.0)
    assert all(is_alive(pids[rank]) for rank in (0, 2))
    assert world.train.ask(node="a", end_gang=pb.EndGang(why="rank 1 died on b"), within_s=5.0).HasField("done")
    assert not any(map(is_alive, pids.values()))


def test_agents_of_two_nodes_are_told_apart(world, two):
    assert {hello.node_id for hello in world.train.hellos} == {"a", "b"}
    assert len({hello.instance_id for hello in world.train.hellos}) == 2
