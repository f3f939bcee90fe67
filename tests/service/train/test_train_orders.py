"""What operators and the monitor ask for."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from train_kit import World, ref, tables, wait_until

from phalanx.api.agent.v1 import record_pb2
from phalanx.api.train.v1 import train_service_pb2 as pb
from phalanx.api.train.v1.train_service_pb2_grpc import TrainServiceStub
from phalanx.core.errors import PhalanxError
from phalanx.lineage.plan import SKIP_KIND
from phalanx.lineage.registry import RegisteredJob, Registry
from phalanx.objects import open_store
from phalanx.rpc import AlreadyExists, Denied, FailedPrecondition, NotFound, Role, connect
from phalanx.train.client import JobState, TrainClient

RUNNING = (JobState.RUNNING,)
JOB = "projects/default/jobs/tiny"


def test_job_that_is_stopped_commits_first(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.train(1, 7)
        assert client.stop("tiny").state is JobState.RUNNING
        job = client.wait("tiny", timeout_s=20)
        assert (job.state, job.checkpoint, job.step) == (JobState.STOPPED, ref(1, 7), 7)
        assert [order.give_orders.stop for order in agent.ordered("give_orders")] == [True]
        assert agent.ordered("end_gang") == []


def test_job_that_does_not_obey_is_ended_after_the_grace(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage, deadlines={"stop_grace_s": 0.5}))
    with world.agent(stops_by_itself=False) as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        client.stop("tiny")
        job = client.wait("tiny", timeout_s=20)
        assert job.state is JobState.STOPPED
        assert job.cause is not None and job.cause.kind == "interrupted"
        assert len(agent.ordered("end_gang")) == 1


def test_job_that_is_suspended_frees_its_node_and_goes_on_when_resumed(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.train(1, 4)
        client.suspend("tiny")
        client.wait("tiny", until=(JobState.SUSPENDED,), timeout_s=20)
        assert client.nodes()[0].num_free_slots == 2
        client.resume("tiny", ["cluster.nproc=1", "training.steps=30"])
        job = client.wait("tiny", until=RUNNING, timeout_s=20)
        assert (job.num_steps, agent.gang(2).start.world_size) == (30, 1)
        assert agent.gang(2).start.parent_step == 4


def test_resume_that_changes_an_identity_key_names_it(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    client.stop("tiny")
    client.wait("tiny", timeout_s=20)
    revision = client.get("tiny").revision
    with pytest.raises(PhalanxError, match=r"training\.seed"):
        client.resume("tiny", ["training.seed=5"])
    with pytest.raises(PhalanxError, match=r"trainng\.steps"):
        client.resume("tiny", ["trainng.steps=5"])
    assert client.get("tiny").revision == revision


def test_resume_with_no_step_left_is_refused_as_a_fork_is(world: World, client: TrainClient) -> None:
    """Be `training.steps` below what was reached or just that: a job that has succeeded can't be resumed again."""
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.train(1, 7)
        client.stop("tiny")
        stopped = client.wait("tiny", timeout_s=20)
        for steps in (3, 7):
            said = rf"^training\.steps is {steps}: expected more than the 7 steps of the checkpoint that "
            with pytest.raises(PhalanxError, match=f"{said}the job goes on from; raise it$"):
                client.resume("tiny", [f"training.steps={steps}"])
            with pytest.raises(PhalanxError, match=f"{said}the fork starts from; raise it, or start from an earlier"):
                client.fork("tiny", overrides=[f"training.steps={steps}"])
        assert client.get("tiny") == stopped
        assert client.resume("tiny", ["training.steps=8"]).num_steps == 8


def test_partial_that_names_no_tensor_is_refused_by_fork_and_resume(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.train(1, 7)
        client.stop("tiny")
        stopped = client.wait("tiny", timeout_s=20)
        wrong = ["checkpoint.partial=nosuchtensor"]
        said = r"^checkpoint\.partial is 'nosuchtensor': expected a tensor of the job, or of its checkpoint"
        with pytest.raises(PhalanxError, match=said):
            client.resume("tiny", wrong)
        for dry_run in (True, False):
            with pytest.raises(PhalanxError, match=said):
                client.fork("tiny", overrides=wrong, dry_run=dry_run)
        assert client.get("tiny") == stopped and len(list(client.list())) == 1


@pytest.mark.parametrize("ask", ["resume", "checkpoint_now"])
def test_request_in_the_wrong_state_is_refused(world: World, client: TrainClient, ask: str) -> None:
    client.submit(tables(world.storage))
    with pytest.raises(FailedPrecondition, match="queued"):
        getattr(client, ask)("tiny")


def test_request_with_an_old_revision_is_refused(world: World, client: TrainClient) -> None:
    revision = client.submit(tables(world.storage)).job.revision
    client.stop("tiny", expected_revision=revision)
    job = client.wait("tiny", timeout_s=20)
    with pytest.raises(FailedPrecondition, match=f"revision {job.revision}"):
        client.resume("tiny", expected_revision=revision)


def test_request_that_is_repeated_changes_nothing(world: World, client: TrainClient) -> None:
    submitted = client.submit(tables(world.storage), request_id="a").job
    again = client.submit(tables(world.storage), request_id="a").job
    assert (again.name, again.revision) == (submitted.name, submitted.revision)
    client.stop("tiny", request_id="b")
    stopped = client.wait("tiny", timeout_s=20)
    assert client.stop("tiny", request_id="b").revision == stopped.revision
    client.resume("tiny", request_id="c")
    resumed = client.get("tiny")
    assert client.resume("tiny", request_id="c").revision == resumed.revision
    with pytest.raises(AlreadyExists, match="something else"):
        client.suspend("tiny", request_id="c")


def test_request_id_of_another_job_is_refused(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage), request_id="a")
    with pytest.raises(AlreadyExists, match="request_id"):
        client.submit(tables(world.storage, "other"), request_id="a")
    with pytest.raises(AlreadyExists, match="request_id"):
        client.submit(tables(world.storage, steps=7), request_id="a")
    with pytest.raises(AlreadyExists, match="resume that job, or choose another"):
        client.submit(tables(world.storage), request_id="b")


def test_dry_run_creates_nothing(world: World, client: TrainClient) -> None:
    checked = client.submit(tables(world.storage), dry_run=True)
    assert (checked.job.name, checked.job.revision) == (JOB, 0)
    with pytest.raises(NotFound):
        client.get("tiny")


@pytest.mark.parametrize("dry_run", [False, True])
def test_submit_whose_storage_takes_nothing_is_refused_and_leaves_nothing(
    world: World, client: TrainClient, dry_run: bool
) -> None:
    with pytest.raises(PhalanxError, match=r"^/proc/x/.*expected a folder that can be made and written"):
        client.submit(tables("file:///proc/x"), request_id="a", dry_run=dry_run)
    assert list(Registry(open_store(world.storage)).names()) == [] and list(client.list()) == []
    assert client.submit(tables(world.storage), request_id="a").job.state is JobState.QUEUED


def test_registered_job_that_cannot_be_reached_is_told_by_the_list(
    world: World, client: TrainClient, caplog: pytest.LogCaptureFixture
) -> None:
    url = "file:///proc/x"
    lost = RegisteredJob("default", "lost", url, tables(url, "lost"), "r", "ann")
    Registry(open_store(world.storage)).create_job(lost)
    client.submit(tables(world.storage))
    with pytest.raises(FailedPrecondition, match=r"expected a job that can be reached .*free its name: remove"):
        client.submit(tables(world.storage, "lost"))
    assert [job.name for job in client.list(page_size=1)] == [JOB]
    told = [record.getMessage() for record in caplog.records if record.name == "phalanx.train.client"]
    assert len(told) == 1 and told[0].startswith("projects/default/jobs/lost: expected a job that can be reached")
    open_store(world.storage).delete(lost.key)
    assert client.submit(tables(world.storage, "lost")).job.name == "projects/default/jobs/lost"
    assert len(list(client.list())) == 2


def test_dry_run_of_a_request_id_that_another_job_has_is_refused(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage), request_id="a")
    with pytest.raises(AlreadyExists, match="request_id is 'a'"):
        client.submit(tables(world.storage, "other"), request_id="a", dry_run=True)
    assert client.submit(tables(world.storage, "other"), request_id="b", dry_run=True).job.revision == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {"steps": 0}}, r"training\.steps"),
        ({"data": {"train": "file://./here"}}, r"data\.train"),
        ({"job": {"storage": "memory://x"}}, r"job\.storage"),
        ({"parallel": {"tp": 3}}, "tp"),
    ],
)
def test_job_file_that_is_wrong_is_refused(
    world: World, client: TrainClient, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(PhalanxError, match=words):
        client.submit(tables(world.storage, **changes))
    assert list(client.list()) == []


def test_jobs_are_listed_newest_first_in_pages(world: World, client: TrainClient) -> None:
    for number in range(7):
        client.submit(tables(world.storage, f"job-{number}"))
    names = [job.name.rpartition("/")[2] for job in client.list(page_size=3)]
    assert names == [f"job-{number}" for number in range(6, -1, -1)]
    assert len(list(client.list(owner="client"))) == 7
    assert list(client.list(owner="nobody")) == []
    assert list(client.list(states=[JobState.RUNNING])) == []
    assert list(client.list("other")) == []


def test_checkpoint_now_is_passed_on_once(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.train(1, 3)
        client.checkpoint_now("tiny")
        wait_until(lambda: client.get("tiny").checkpoint == ref(1, 3), "the checkpoint")
        assert [order.give_orders.checkpoint for order in agent.ordered("give_orders")] == [True]


def test_stacks_and_logs_come_from_the_ranks_nodes(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage, nproc=4))
    with world.agent("n1"), world.agent("n2"):
        client.wait("tiny", until=RUNNING, timeout_s=20)
        assert sorted(client.stacks("tiny")) == [0, 1, 2, 3]
        assert client.stacks("tiny", [2]) == {2: "stack of rank 2"}
        pieces = list(client.logs("tiny", 3))
        assert b"".join(piece.data for piece in pieces) == b"attempt 1 rank 3\n"
        assert pieces[-1].next_offset == 17
        with pytest.raises(NotFound, match="rank"):
            list(client.logs("tiny", 9))


def test_log_is_followed_over_attempts_to_the_jobs_end(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        pieces = client.logs("tiny", 1, follow_on=True)
        assert next(pieces).data == b"attempt 1 rank 1\n"
        agent.die(1)
        assert next(pieces).data == b"attempt 2 rank 1\n"
        client.stop("tiny")
        assert list(pieces) == []


def test_fork_starts_from_a_checkpoint_of_another_job(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.commit(1, 5)
        agent.commit(1, 10)
        with pytest.raises(NotFound, match="a1-s10"):
            client.fork("tiny", "7")
        forked = client.fork("tiny", "5", ["training.seed=9"], request_id="f").job
        assert (forked.name, forked.origin) == (f"{JOB}-2", client.get("tiny-2").origin)
        assert forked.origin is not None and forked.origin.checkpoint == ref(1, 5)
        assert client.fork("tiny", "5", ["training.seed=9"], request_id="f").job.name == forked.name
        with pytest.raises(PhalanxError, match=r"model\.args\.dim"):
            client.fork("tiny", "latest", ["model.args.dim=64"])
        client.stop("tiny")
        order = agent.await_order("prepare", 2)
        assert (order.prepare.origin.job, order.prepare.origin.step) == (JOB, 5)


# The monitor.


def stub(world: World, role: Role = Role.SERVICE) -> TrainServiceStub:
    return TrainServiceStub(connect("train", world.config.listen, world.cluster.credentials(role, name="monitor")))


def verdict(
    action: pb.IncidentAction.ValueType, first: int = 0, last: int = 0, **fields: Any
) -> pb.ReportIncidentRequest:
    cause = record_pb2.Cause(kind=record_pb2.CAUSE_KIND_NAN, message="loss is nan")
    given = {"request_id": uuid.uuid4().hex, "job": JOB, "attempt": 1, "first_step": first, "last_step": last}
    return pb.ReportIncidentRequest(**{**given, "cause": cause, "action": action, **fields})


def skips(world: World, attempt: int) -> list[tuple[int, int]]:
    entries = world.lineage().journal(attempt)
    return [(entry.position, entry.payload["num_windows"]) for entry in entries if entry.kind == SKIP_KIND]


def test_verdict_to_roll_back_goes_back_and_leaves_the_windows_out(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        for step in (5, 10):
            agent.commit(1, step)
        agent.train(1, 12)
        wait_until(lambda: client.get("tiny").checkpoint == ref(1, 10), "the checkpoints")
        asked = verdict(pb.INCIDENT_ACTION_ROLL_BACK, 8, 9)
        monitor = stub(world)
        assert monitor.ReportIncident(asked).action == pb.INCIDENT_ACTION_ROLL_BACK
        start = agent.gang(2).start
        assert (start.parent_attempt, start.parent_step) == (1, 5)
        assert skips(world, 2) == [(7 * 8, 2 * 8)]
        assert monitor.ReportIncident(asked).action == pb.INCIDENT_ACTION_ROLL_BACK
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.die(2)
        agent.gang(3)
        assert skips(world, 3) == [(7 * 8, 2 * 8)], "an attempt without a checkpoint takes its journal with it"
        assert len(agent.ordered("end_gang")) == 1


def test_verdict_to_skip_lets_the_run_go_on(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        asked = verdict(pb.INCIDENT_ACTION_SKIP, 3, 3)
        for _ in range(2):
            assert stub(world).ReportIncident(asked).action == pb.INCIDENT_ACTION_SKIP
        assert skips(world, 1) == [(16, 8)]
        assert agent.ordered("end_gang") == []
        agent.die(1)
        agent.gang(2)
        assert skips(world, 2) == [(16, 8)]


def test_verdict_to_restart_starts_the_next_attempt(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        assert stub(world).ReportIncident(verdict(pb.INCIDENT_ACTION_RESTART)).action == pb.INCIDENT_ACTION_RESTART
        agent.gang(2)


def test_verdict_on_an_older_attempt_is_not_acted_on(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.die(1)
        agent.gang(2)
        client.wait("tiny", until=RUNNING, timeout_s=20)
        answer = stub(world).ReportIncident(verdict(pb.INCIDENT_ACTION_ROLL_BACK, 1, 1))
        assert (answer.action, "over" in answer.message) == (pb.INCIDENT_ACTION_NOTIFY, True)
        assert agent.ordered("end_gang") == []


def test_records_are_watched_with_numbers_and_events(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        client.wait("tiny", until=RUNNING, timeout_s=20)
        agent.train(1, 1)
        stream = stub(world).WatchRecords(pb.WatchRecordsRequest(), timeout=20)
        told = []
        for message in stream:
            told.append(message)
            if message.record.progress.step == 1:
                break
        numbers = [message.number for message in told if message.WhichOneof("message")]
        assert numbers == list(range(1, len(numbers) + 1))
        again = stub(world).WatchRecords(pb.WatchRecordsRequest(log_id=told[0].log_id, after=numbers[-1]), timeout=20)
        agent.train(1, 2)
        new = next(message for message in again if message.WhichOneof("message"))
        assert (new.number, new.record.progress.step) == (numbers[-1] + 1, 2)


@pytest.mark.parametrize("role", [Role.VIEWER, Role.AGENT, Role.SERVICE])
def test_role_that_may_not_submit_is_denied(world: World, role: Role) -> None:
    with world.client(role) as client, pytest.raises(Denied):
        client.submit(tables(world.storage))


def test_viewer_may_look(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.client(Role.VIEWER) as viewer:
        assert viewer.get("tiny").state is JobState.QUEUED
        assert viewer.nodes() == ()
        with pytest.raises(Denied):
            viewer.stop("tiny")


def test_token_of_another_project_is_denied(world: World, client: TrainClient) -> None:
    from phalanx.train.client import connect_train

    client.submit(tables(world.storage))
    with connect_train(world.config.listen, world.cluster.credentials(Role.OPERATOR, "other")) as stranger:
        with pytest.raises(Denied, match="project"):
            stranger.get("tiny")
        with pytest.raises(Denied, match="project"):
            stranger.submit(tables(world.storage, "mine"))
        assert list(stranger.list()) == []


def test_attempts_token_is_for_that_attempt_alone(world: World, client: TrainClient) -> None:
    client.submit(tables(world.storage))
    with world.agent() as agent:
        caller = world.cluster.tokens.verifier().verify(agent.gang(1).start.token)
    assert (caller.role, caller.project, caller.job, caller.attempt) == (Role.AGENT, "default", "tiny", 1)


def test_attempts_token_opens_no_stream_of_an_agent(world: World) -> None:
    from phalanx.api.agent.v1 import agent_service_pb2 as agent_pb
    from phalanx.api.agent.v1.agent_service_pb2_grpc import AgentServiceStub

    credentials = world.cluster.credentials(Role.AGENT, "default", "tiny", 1)
    stream = AgentServiceStub(connect("train", world.config.listen, credentials)).Connect(
        iter([agent_pb.ConnectRequest()])
    )
    with pytest.raises(Denied, match="own token"):
        next(stream)
