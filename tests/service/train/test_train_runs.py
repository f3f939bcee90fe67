"""Jobs from their submission to their end, with agents that hold no ranks."""

from __future__ import annotations

from train_kit import World, cause, ref, tables, wait_until

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


def test_job_of_a_user_error_fails_and_is_never_retried(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        agent.gang(1)
        agent.die(1, "USER_ERROR")
        job = client.wait("tiny", timeout_s=20)
        assert (job.state, job.attempt) == (JobState.FAILED, 1)
        assert job.cause is not None and job.cause.kind == "user_error"
        wait_until(lambda: agent.is_all_acknowledged, "the end to be acknowledged")
        assert len(agent.ordered("start_gang")) == 1


def test_job_that_the_check_refuses_fails_without_an_attempt(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent(refuse={"prepare": cause("USER_ERROR", message="data.train is wrong")}):
        job = client.wait("tiny", timeout_s=20)
    assert (job.state, job.attempt, job.message) == (JobState.FAILED, 0, "data.train is wrong")
    assert world.lineage().newest_attempt() is None


def test_job_that_dies_without_progress_is_given_up_after_three_attempts(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        for attempt in (1, 2, 3):
            agent.gang(attempt)
            client.wait("tiny", until=(JobState.RUNNING,), timeout_s=20)
            agent.die(attempt)
        job = client.wait("tiny", timeout_s=20)
    assert (job.state, job.attempt, job.num_attempts_without_progress) == (JobState.FAILED, 3, 3)


def test_job_that_dies_after_each_checkpoint_is_not_given_up(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        for attempt in range(1, 6):
            agent.train(attempt, attempt + 1)
            agent.commit(attempt, attempt)
            agent.die(attempt)
        assert agent.gang(6).start.parent_step == 5
        client.wait("tiny", until=(JobState.RUNNING,), timeout_s=20)
        assert client.get("tiny").num_attempts_without_progress == 0


def test_gang_that_cannot_start_does_not_use_the_budget_up(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent(refuse={"start_gang": cause("ERROR")}) as agent:
        agent.await_order("start_gang", 3)
        job = client.get("tiny")
        assert job.num_attempts_without_progress == 0
        assert job.state in (JobState.STARTING, JobState.RECOVERING)
        agent.refuse.clear()
        client.wait("tiny", until=(JobState.RUNNING,), timeout_s=20)


def test_job_over_two_nodes_meets_where_rank_0_says(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage, nproc=4))
    with world.agent("n1") as first:
        wait_until(lambda: "4 slots: 2 are free" in client.get("tiny").message, "the message")
        with world.agent("n2") as second:
            client.wait("tiny", until=(JobState.RUNNING,), timeout_s=20)
            head, other = first.gang(1), second.gang(1)
            assert (head.ranks, head.start.rendezvous) == ((0, 1), "")
            assert (other.ranks, other.start.rendezvous) == ((2, 3), "127.0.0.1:7")
            second.die(1, "HANG")
            first.await_order("end_gang")
            assert second.gang(2).start.world_size == 4
            job = client.get("tiny")
            assert [each.node_id for each in job.placement] == ["n1", "n2"]


def test_cause_of_the_node_that_says_most_is_told(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage, nproc=4, recovery={"max_attempts_without_progress": 1}))
    with world.agent("n1") as first, world.agent("n2") as second:
        client.wait("tiny", until=(JobState.RUNNING,), timeout_s=20)
        first.die(1, "LOST_PEER", weight=2)
        second.die(1, "OUT_OF_MEMORY")
        job = client.wait("tiny", timeout_s=20)
        assert job.cause is not None
        assert (job.cause.kind, job.cause.node_id) == ("out_of_memory", "n2")


def test_jobs_that_wait_for_one_node_run_in_the_order_of_their_submission(world: World, client: TrainClient) -> None:
    names = ("third", "second", "first")
    for name in names:
        client.submit(tables(world.storage, name))
    with world.agent(slots=2) as agent:
        for number, name in enumerate(names):
            client.wait(name, until=(JobState.RUNNING,), timeout_s=20)
            states = {job.name.rpartition("/")[2]: job.state for job in client.list()}
            assert {states[later] for later in names[number + 1 :]} <= {JobState.QUEUED, JobState.PREPARING}
            agent.end(1, pb.GANG_STATE_FINISHED, job=name)
            client.wait(name, timeout_s=20)


def test_two_jobs_share_a_node_by_its_slots(world: World, client: TrainClient) -> None:
    for name in ("one", "two", "three"):
        client.submit(tables(world.storage, name))
    with world.agent(slots=4) as agent:
        wait_until(lambda: len(agent.gangs) == 2, "two gangs")
        (node,) = client.nodes()
        assert node.num_free_slots == 0
        waiting = [job for job in client.list() if job.state is JobState.QUEUED]
        assert len(waiting) == 1 and "waits for 2 slots" in waiting[0].message
        (name, attempt) = next(iter(agent.gangs))
        agent.end(attempt, pb.GANG_STATE_FINISHED, job=name.rpartition("/")[2])
        client.wait(waiting[0].name, until=(JobState.RUNNING,), timeout_s=20)
