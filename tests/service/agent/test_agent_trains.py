"""A real job through an agent: prepared, trained on two ranks, stopped, gone on with; plans and commits by its
socket.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit import JOB, World, wait_until
from support.jobs import prepared_corpus, write_job

from phalanx.agent.agent import Agent
from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1 import record_pb2
from phalanx.lineage import Lineage
from phalanx.snapshot.commit import commit
from phalanx.snapshot.draft_message import draft_of
from phalanx.spec import Job, load_job
from phalanx.spec.job import plain
from phalanx.trainer.places import job_store
from phalanx.trainer.shipping import with_code

pytestmark = pytest.mark.distributed
OWN_MODEL = """
from torch import nn


class Bigram(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)

    def forward(self, tokens, position_ids, document_ids):
        return self.head(self.embedding(tokens))
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.fixture
def trainer(world: World) -> Iterator[Agent]:
    """An agent whose ranks train."""
    with Agent(world.agent_config(stop_grace_s=30.0)) as made:
        wait_until(lambda: world.train.hellos, 10.0, "the agent's hello")
        yield made


def prepare(world: World, job: Job) -> pb.Prepared:
    answer = world.train.ask(attempt=0, prepare=pb.Prepare(spec_json=json.dumps(plain(job)), world_size=2))
    assert answer.HasField("prepared"), answer
    return answer.prepared


def open_and_start(world: World, job: Job, prepared: pb.Prepared) -> int:
    """Does train's part: opens the attempt, starts the gang; the attempt."""
    lineage = Lineage(job_store(job))
    attempt = lineage.open_attempt(
        code_digest=prepared.code_digest,
        identity_digest=prepared.identity_digest,
        placement=json.loads(prepared.placement_json),
    )
    order = pb.StartGang(
        arguments_json=prepared.arguments_json,
        world_size=2,
        ranks=[0, 1],
        token=world.token(attempt.number),
        code_digest=prepared.code_digest,
        parent_attempt=attempt.parent.attempt if attempt.parent else 0,
        parent_step=attempt.parent.step if attempt.parent else 0,
    )
    answer = world.train.ask(attempt=attempt.number, start_gang=order)
    assert answer.HasField("gang_started"), answer
    return attempt.number


def commits_of(job: Job):
    """Commits as the checkpoint service does."""
    store = job_store(job)

    def take(draft) -> None:
        commit(Lineage(store), store, draft_of(draft), draft.world_size, 60.0)

    return take


def test_agent_real_job_trains_stops_with_a_checkpoint_and_goes_on_from_it(world, trainer, corpus, tmp_path):
    job = load_job(write_job(tmp_path, corpus, steps=400))
    world.checkpoint.commit = commits_of(job)
    prepared = prepare(world, job)
    assert json.loads(prepared.arguments_json)["identity_digest"] == prepared.identity_digest
    first = open_and_start(world, job, prepared)
    wait_until(lambda: len(world.train.records("progress", first)) > 20, 60.0, "steps")
    assert world.train.ask(attempt=first, give_orders=pb.GiveOrders(stop=True)).HasField("done")
    ended = world.train.wait_ended(first, within_s=60.0)
    assert ended.state == pb.GANG_STATE_STOPPED, ended
    assert ended.committed_step == ended.last_step > 20
    assert {each.name for each in world.train.records("phase", first)} >= {"init", "plan", "first_step", "step", "save"}
    assert [each.stopped for each in world.train.records("finished", first)] == [True, True]

    shorter = load_job(write_job(tmp_path, corpus, steps=ended.last_step + 5))
    second = open_and_start(world, shorter, prepare(world, shorter))
    ended_again = world.train.wait_ended(second, within_s=60.0)
    assert (ended_again.state, ended_again.last_step) == (pb.GANG_STATE_FINISHED, ended.last_step + 5), ended_again
    assert [each.step for each in world.train.records("opened", second)] == [ended.last_step] * 2
    rows = [json.loads(line) for line in (tmp_path / "metrics" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    wait_until(lambda: len(world.receiver.rows) > ended.last_step, 10.0, "figures at the monitor")
    assert world.receiver.jobs == {JOB}
    assert {row["step"] for row in rows if "step" in row} == set(range(1, ended.last_step + 6))
    live = [checkpoint.step for checkpoint in Lineage(job_store(job)).checkpoints()]
    assert live[-1] == ended.last_step + 5


def test_agent_users_model_that_was_edited_since_the_attempt_was_opened_is_refused(
    world, corpus, tmp_path, monkeypatch
):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "agents_own_model.py").write_text(OWN_MODEL)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    path = write_job(tmp_path, corpus, steps=4)
    model = 'class = "agents_own_model:Bigram"\n[model.args]\nvocab_size = 300'
    path.write_text(path.read_text().replace('preset = "tiny"', model))
    job = load_job(path)
    world.checkpoint.commit = commits_of(job)
    with Agent(world.agent_config()):
        wait_until(lambda: world.train.hellos, 10.0, "the agent's hello")
        prepared = prepare(world, job)
        first = open_and_start(world, job, prepared)
        assert world.train.wait_ended(first, within_s=60.0).state == pb.GANG_STATE_FINISHED
        (folder / "agents_own_model.py").write_text(OWN_MODEL + "\n# edited\n")
        second = open_and_start(world, job, prepared)
        ended = world.train.wait_ended(second, within_s=60.0)
    assert ended.cause.kind == record_pb2.CAUSE_KIND_USER_ERROR
    assert "agents_own_model:Bigram" in ended.cause.message and prepared.code_digest in ended.cause.message


def test_agent_trains_packed_code_that_lies_nowhere_on_its_node(world, corpus, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "packed_own_model.py").write_text(OWN_MODEL)
    path = write_job(tmp_path, corpus, steps=2)
    model = 'class = "packed_own_model:Bigram"\n[model.args]\nvocab_size = 300\n[code]\npath = "elsewhere"'
    path.write_text(path.read_text().replace('preset = "tiny"', model))
    job, _ = with_code(load_job(path, [f"cluster.cache_folder={tmp_path / 'cache'}"]))
    shutil.rmtree(folder)
    world.checkpoint.commit = commits_of(job)
    with Agent(world.agent_config()):
        wait_until(lambda: world.train.hellos, 10.0, "the agent's hello")
        prepared = prepare(world, job)
        ended = world.train.wait_ended(open_and_start(world, job, prepared), within_s=60.0)
    assert ended.state == pb.GANG_STATE_FINISHED, ended
    newest = Lineage(job_store(job)).newest_attempt()
    assert newest is not None and newest.placement["code"] == {"digest": job.code.digest}
    assert newest.code_digest == prepared.code_digest


def test_agent_prepare_of_a_job_without_its_data_is_a_user_error(world, trainer, tmp_path):
    job = load_job(write_job(tmp_path, (tmp_path / "nothing").as_uri()))
    answer = world.train.ask(attempt=0, prepare=pb.Prepare(spec_json=json.dumps(plain(job)), world_size=2))
    assert answer.failure.cause.kind == record_pb2.CAUSE_KIND_USER_ERROR
    assert "data.train" in answer.failure.cause.message
