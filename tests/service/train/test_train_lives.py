"""Nodes that go, a train process that is killed anywhere, two of them: nothing is done twice, nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from train_kit import World, make_world, put_checkpoint, ref, tables, wait_until

from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1 import record_pb2
from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.api.train.v1.train_service_pb2_grpc import TrainServiceStub
from phalanx.lineage.damage import report_damage
from phalanx.lineage.events import EventLog, EventType, JobState
from phalanx.lineage.registry import Registry
from phalanx.objects import open_store
from phalanx.rpc import OutOfRange, Role, Unavailable, connect
from phalanx.rpc.testing import make_cluster
from phalanx.train.client import TrainClient
from phalanx.train.store import JobStore

RUNNING = (JobState.RUNNING,)


def events_of(world: World, name: str = "tiny") -> list[EventType]:
    """What is in storage."""
    registered = Registry(open_store(world.storage)).job("default", name)
    assert registered is not None
    return [event.type for event in EventLog(registered.store()).after(0)]


# Nodes.


def test_node_that_is_cut_off_for_long_loses_its_attempt_to_another(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent("n1") as first:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        first.commit(1, 5)
        wait_until(lambda: client.get("tiny").checkpoint == ref(1, 5), "the checkpoint")
        with world.agent("n2") as second:
            first.disconnect()
            assert second.gang(2).start.parent_step == 5
            job = client.wait("tiny", until=RUNNING, timeout_s=20)
            assert (job.attempt, job.placement[0].node_id) == (2, "n2")
            put_checkpoint(world.lineage(), 1, 10)
            first.reconnect()
            assert first.await_order("end_gang").end_gang.superseded
            wait_until(lambda: not first.gangs and first.is_all_acknowledged, "the zombie to end")
            assert world.lineage().checkpoints() == (ref(1, 5),), "what a zombie commits is not live"
            assert client.get("tiny").checkpoint == ref(1, 5)
            second.commit(2, 10)
            wait_until(lambda: client.get("tiny").checkpoint == ref(2, 10), "the newest attempt's checkpoint")


def test_node_that_is_cut_off_for_a_moment_goes_on(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.disconnect()
        wait_until(lambda: not client.nodes()[0].node.is_connected, "the cut")
        agent.train(1, 3)
        agent.commit(1, 3)
        agent.reconnect()
        wait_until(lambda: client.get("tiny").checkpoint == ref(1, 3), "what was told meanwhile")
        assert client.get("tiny").attempt == 1
        assert client.get("tiny").state is JobState.RUNNING


def test_attempt_that_finds_its_checkpoint_damaged_ends_and_the_next_has_an_older_parent(
    world: World, client: TrainClient
) -> None:
    """Case 7: the damage is an incident of the job by name, and no later attempt starts from there."""
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.commit(1, 5)
        agent.commit(1, 10)
        wait_until(lambda: client.get("tiny").checkpoint == ref(1, 10), "the newest checkpoint")
        agent.die(1)
        assert agent.gang(2).start.parent_step == 10
        report_damage(world.lineage(), 2, ref(1, 10), 80, "object x holds other bytes")
        agent.say(2, damaged=record_pb2.Damaged(what="attempt 1 step 10", why="object x holds other bytes"))
        agent.die(2, "STORAGE")
        assert agent.gang(3).start.parent_step == 5
    registered = Registry(open_store(world.storage)).job("default", "tiny")
    assert registered is not None
    causes = [event.cause for event in EventLog(registered.store()).after(0) if event.cause is not None]
    named = [cause for cause in causes if cause.kind == "bad_checkpoint"]
    assert [cause.message for cause in named] == ["attempt 1 step 10: object x holds other bytes"]


def test_death_whose_peers_take_their_time_is_told_at_once_and_its_attempt_ends_later(
    world: World, client: TrainClient
) -> None:
    """Two ranks of one attempt die: one event, and another for the end of the attempt, once the gang is over."""
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        killed = record_pb2.Ended(signal=signal.SIGKILL)
        for _ in range(2):
            agent.say(1, ended=killed)
        wait_until(lambda: EventType.INCIDENT in events_of(world), "the death as an event", 5.0)
        assert client.get("tiny").state is JobState.RUNNING
        agent.die(1)
        agent.gang(2)
        agent.say(2, ended=killed)
        agent.die(2)
        agent.gang(3)
    told = [each for each in events_of(world) if each in (EventType.INCIDENT, EventType.RECOVERING)]
    assert told == [EventType.INCIDENT, EventType.RECOVERING, EventType.RECOVERING]


def test_agent_that_comes_back_as_another_process_has_lost_its_ranks(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent("n1") as old:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        old.commit(1, 5)
        wait_until(lambda: client.get("tiny").checkpoint, "the checkpoint")
    with world.agent("n1") as new:
        assert new.gang(2).start.parent_step == 5
        job = client.wait("tiny", until=RUNNING, timeout_s=20)
        assert job.attempt == 2
        assert [order.attempt for order in new.ordered("start_gang")] == [2]


def test_second_stream_of_a_node_ends_the_first(world: World, client: TrainClient) -> None:
    with world.agent("n1", instance_id="a") as first:
        number = first.num_welcomes
        with world.agent("n1", instance_id="b") as second:
            first.connect_allowed.clear()
            assert second.num_welcomes >= 1
            wait_until(lambda: first._session is None, "the end of the first stream")
            assert first.num_welcomes == number
            assert [node.node.instance_id for node in client.nodes()] == ["b"]


def test_no_node_left_is_waited_for_and_said(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent():
        client.wait("tiny", until=RUNNING, timeout_s=20)
    wait_until(lambda: client.get("tiny").state is JobState.RECOVERING, "the loss")
    wait_until(lambda: "waits for 2 slots" in client.get("tiny").message, "what it waits for")
    with world.agent("n2") as other:
        other.gang(2)


# The process.


E = EventType
ATTEMPT = [E.STARTING, E.RUNNING, E.COMMITTED]
RUN = [E.SUBMITTED, E.PREPARING, E.PREPARED, *ATTEMPT, E.RECOVERING, *ATTEMPT, E.SUCCEEDED]  # whatever is killed when


def keep_alive(world: World, program: tuple[str, ...], over: threading.Event) -> None:
    """What a supervisor does."""
    while not over.is_set():
        assert world.process is not None
        if world.process.poll() is not None:
            world.spawn(*program)
        over.wait(0.01)


def answered(client: TrainClient, world: World) -> bool:
    """Whether the job is submitted, asked for under one request id however often a process dies over it."""
    try:
        return client.submit(tables(world.storage), request_id="r").job.name.endswith("tiny")
    except Unavailable:
        return False


@pytest.mark.timeout(600)  # a process starts ten times in turn: 2 s each on an idle machine, 10 s on a busy one
@pytest.mark.parametrize("moment", ["before", "after"])
def test_train_killed_at_every_event_goes_on_where_its_events_say(tmp_path: Path, moment: str) -> None:
    world, over = make_world(make_cluster(tmp_path / "cluster"), tmp_path, agent_lost_s=60.0), threading.Event()
    program = (str(Path(__file__).with_name("train_dies.py")), str(tmp_path), moment)
    world.start(*program)
    keeper = threading.Thread(target=keep_alive, args=(world, program, over), daemon=True)
    keeper.start()
    try:
        with world.client() as client, world.agent() as agent:
            wait_until(lambda: answered(client, world), "the submission", 180)
            wait_until(lambda: events_of(world).count(E.RUNNING) == 1, "attempt 1", 180)
            agent.train(1, 5)
            agent.commit(1, 5)
            wait_until(lambda: agent.is_all_acknowledged, "the commit to be acknowledged", 180)
            agent.die(1)
            wait_until(lambda: events_of(world).count(E.RUNNING) == 2, "attempt 2", 180)
            agent.commit(2, 20)
            agent.end(2, pb.GANG_STATE_FINISHED)
            wait_until(lambda: agent.is_all_acknowledged, "the end to be acknowledged", 180)
            # A process that has no agent yet lets a checked job wait for one.
            assert [kind for kind in events_of(world) if kind is not E.QUEUED] == RUN
            assert [order.attempt for order in agent.ordered("start_gang")] == [1, 2], "no attempt starts twice"
            assert len(agent.ordered("prepare")) == 1
            assert client.wait("tiny", timeout_s=180).state is JobState.SUCCEEDED
    finally:
        over.set()
        keeper.join(10)
        world.close()
    assert len(list(tmp_path.glob("died-*"))) == len(events_of(world))
    assert [attempt.number for attempt in world.lineage().attempts()] == [1, 2]


def test_gang_outlives_the_train_process(patient: World) -> None:
    with patient.client() as client, patient.agent() as agent:
        client.submit(tables(patient.storage))
        client.wait("tiny", until=RUNNING, timeout_s=20)
        patient.kill()
        agent.train(1, 9)
        agent.commit(1, 9)
        patient.start()
        wait_until(lambda: client.get("tiny").checkpoint == ref(1, 9), "what was told meanwhile")
        job = client.get("tiny")
        assert (job.state, job.attempt, job.step) == (JobState.RUNNING, 1, 9)
        assert [order.attempt for order in agent.ordered("start_gang")] == [1]


def test_node_that_went_while_train_was_away_is_given_up(mortal: World) -> None:
    with mortal.client() as client:
        client.submit(tables(mortal.storage))
        with mortal.agent("n1"):
            client.wait("tiny", until=RUNNING, timeout_s=20)
            mortal.kill()
        mortal.start()
        with mortal.agent("n2") as other:
            other.gang(2)


def test_database_that_is_deleted_is_made_again_from_storage(mortal: World) -> None:
    url = mortal.config.database
    assert url is not None
    with mortal.client() as client, mortal.agent() as agent:
        client.submit(tables(mortal.storage, "one"))
        client.submit(tables(mortal.storage, "two"))
        client.stop("two")
        client.wait("two", timeout_s=20)
        agent.gang(1, "one")
        agent.commit(1, 5, "one")
        agent.end(1, pb.GANG_STATE_FINISHED, job="one")
        client.wait("one", timeout_s=20)
        before = [client.get(name) for name in ("one", "two")]
    mortal.kill()
    database = mortal.folder / "train.sqlite"
    copied = JobStore(url.url, open_store(mortal.storage).url)
    rows = copied.dump()
    copied.close()
    for path in mortal.folder.glob("train.sqlite*"):
        path.unlink()
    mortal.start()
    with mortal.client() as client:
        assert [client.get(name) for name in ("one", "two")] == before
    mortal.kill()
    assert database.exists()
    made = JobStore(url.url, open_store(mortal.storage).url)
    assert made.dump() == rows
    made.close()


@pytest.fixture
def other(mortal: World, tmp_path: Path) -> Iterator[World]:
    """Another train process on the storage of the first, not yet started."""
    (tmp_path / "other").mkdir()
    made = make_world(mortal.cluster, tmp_path / "other")
    made.config = replace(made.config, storage=mortal.storage)
    yield made
    made.close()


def test_later_train_process_takes_over_and_the_earlier_one_ends(mortal: World, other: World) -> None:
    with mortal.agent("n1") as first:
        with mortal.client() as client:
            client.submit(tables(mortal.storage))
            client.wait("tiny", until=RUNNING, timeout_s=20)
        first.commit(1, 5)
        wait_until(lambda: first.is_all_acknowledged, "the commit")
        other.start()
        assert mortal.process is not None
        assert mortal.process.wait(20) == 2
        assert "a later one has begun" in mortal.log
        with other.agent("n2") as second, other.client() as client:
            assert second.gang(2).start.parent_step == 5
            assert client.wait("tiny", until=RUNNING, timeout_s=20).attempt == 2
    assert [attempt.number for attempt in mortal.lineage().attempts()] == [1, 2]


def test_train_process_that_was_asleep_changes_nothing_when_it_wakes(mortal: World, other: World) -> None:
    with mortal.client() as client:
        client.submit(tables(mortal.storage))
    assert mortal.process is not None
    os.kill(mortal.process.pid, signal.SIGSTOP)
    other.start()
    with other.agent("n2") as second, other.client() as client:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        known = events_of(mortal)
        os.kill(mortal.process.pid, signal.SIGCONT)
        assert mortal.process.wait(20) == 2
        assert events_of(mortal) == known
        second.commit(1, 20)
        second.end(1, pb.GANG_STATE_FINISHED)
        assert client.wait("tiny", timeout_s=20).state is JobState.SUCCEEDED


def test_train_process_that_does_not_get_its_address_replaces_nobody(mortal: World, other: World) -> None:
    other.config = replace(other.config, listen=mortal.config.listen)
    other.spawn()
    assert other.process is not None and other.process.wait(30) == 2
    with mortal.agent(), mortal.client() as client:
        client.submit(tables(mortal.storage))
        client.wait("tiny", until=RUNNING, timeout_s=20)


# Watching.


def test_watcher_of_a_hundred_connections_misses_nothing_and_sees_nothing_twice(
    world: World, client: TrainClient
) -> None:
    client.submit(tables(world.storage))
    channel = connect("train", world.config.listen, world.cluster.credentials(Role.VIEWER))
    stub, seen, num_streams = TrainServiceStub(channel), [], 0
    with world.agent() as agent:
        for step in range(1, 101):
            agent.gang(1)
            agent.commit(1, step)
            after = seen[-1] if seen else 0
            stream = stub.WatchJob(train_pb.WatchJobRequest(name="projects/default/jobs/tiny", after_revision=after))
            num_streams += 1
            for message in stream:
                if message.WhichOneof("message") == "event":
                    seen.append(message.event.revision)
                    break
            stream.cancel()
        wait_until(lambda: client.get("tiny").checkpoint == ref(1, 100), "the last commit")
        newest = client.get("tiny").revision
        for event in client.watch("tiny", seen[-1]):
            seen.append(event.revision)
            if event.revision == newest:
                break
    assert num_streams == 100
    assert seen == list(range(1, newest + 1))


def test_watcher_goes_on_through_a_restart(patient: World) -> None:
    with patient.client() as client, patient.agent() as agent:
        client.submit(tables(patient.storage))
        watched = client.watch("tiny")
        seen = [next(watched) for _ in range(3)]
        client.wait("tiny", until=RUNNING, timeout_s=20)
        patient.kill()
        patient.start()
        agent.commit(1, 20)
        agent.end(1, pb.GANG_STATE_FINISHED)
        for event in watched:
            seen.append(event)
            if event.type is EventType.SUCCEEDED:
                break
    assert [event.revision for event in seen] == list(range(1, len(seen) + 1))


@pytest.mark.parametrize("after", [0, 99])
def test_watch_from_a_revision_that_is_not_kept_is_refused(tmp_path: Path, after: int) -> None:
    world = make_world(make_cluster(tmp_path / "cluster"), tmp_path, kept_events=3)
    world.start_here()
    try:
        with world.client() as client:
            client.submit(tables(world.storage))
            client.suspend("tiny")
            client.wait("tiny", until=(JobState.SUSPENDED,), timeout_s=20)
            client.resume("tiny")
            client.stop("tiny")
            job = client.wait("tiny", until=(JobState.STOPPED,), timeout_s=20)
            with pytest.raises(OutOfRange, match=f"from {job.revision - 3}.* to {job.revision}"):
                next(client.watch("tiny", after))
            assert next(client.watch("tiny", job.revision - 3)).revision == job.revision - 2
    finally:
        world.close()
