"""Jobs from their submission to their end, with agents that hold no ranks."""

from __future__ import annotations

from train_kit import World, ref, tables, wait_until

from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.lineage.events import EventType
from phalanx.train.client import JobState, TrainClient

RUNNING = (JobState.RUNNING,)


def test_job_with_an_agent_runs_to_its_end(world: World, client: TrainClient) -> None:
    submitted = client.submit(tables(world.storage))
    assert submitted.job.state is JobState.QUEUED
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.train(1, 3, loss=2.5)
        assert wait_until(lambda: client.get("tiny").step == 3, "step 3")
        assert client.get("tiny").loss == 2.5
        agent.commit(1, 10)
        agent.train(1, 20)
        agent.commit(1, 20)
        agent.end(1, pb.GANG_STATE_FINISHED)
        job = client.wait("tiny", timeout_s=20)
        assert (job.state, job.step, job.checkpoint) == (JobState.SUCCEEDED, 20, ref(1, 20))
        wait_until(lambda: agent.is_all_acknowledged, "the reports to be acknowledged")
        agent.await_order("release_job")
    start = agent.ordered("start_gang")[0].start_gang
    assert (start.world_size, list(start.ranks), start.rendezvous) == (2, [0, 1], "")
    types = []
    for event in client.watch("tiny"):
        types.append(event.type)
        if event.type is EventType.SUCCEEDED:
            break
    E = EventType  # noqa: N806
    assert types == [
        E.SUBMITTED,
        E.PREPARING,
        E.PREPARED,
        E.STARTING,
        E.RUNNING,
        E.COMMITTED,
        E.COMMITTED,
        E.SUCCEEDED,
    ]


def test_job_whose_rank_dies_goes_on_from_the_checkpoint(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        agent.gang(1)
        agent.train(1, 6)
        agent.commit(1, 5)
        agent.die(1)
        start = agent.gang(2).start
        assert (start.parent_attempt, start.parent_step) == (1, 5)
        agent.train(2, 20)
        agent.commit(2, 20)
        agent.end(2, pb.GANG_STATE_FINISHED)
        assert client.wait("tiny", timeout_s=20).state is JobState.SUCCEEDED
