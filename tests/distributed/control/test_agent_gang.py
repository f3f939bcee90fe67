"""Whole gangs that train beside an agent: real ranks, a real RankService on a Unix socket, the lineage behind it."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rank_server import JOB, RankServer
from support.jobs import Run, assert_proven, write_job

from phalanx.api.agent.v1 import rank_service_pb2 as pb
from phalanx.api.data.v1 import data_service_pb2 as data_pb
from phalanx.gang import Event, ForkServer, Gang, GangOrder, GangOutcome
from phalanx.gang.watch import Watch
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.spec import load_job
from phalanx.trainer.local import ENTRY
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import prepare, to_arguments
from phalanx.trainer.step_times import EVERY_STEPS

pytestmark = pytest.mark.distributed
PATIENCE_S = 40.0
HORIZON = 4
HELD_UP = {"plan": [("plan", HORIZON + 1)], "commit": [("commit", HORIZON)]}  # phases in which an agent is needed


class Node:
    """One attempt of the job at `path` after the other, each started as an agent does."""

    def __init__(self, path: Path, server: ForkServer, *overrides: str) -> None:
        self.job = load_job(path, overrides)
        self.prepared = prepare(self.job, self.job.cluster.world_size)
        self.lineage = Lineage(job_store(self.job))
        self.folder = Path(tempfile.mkdtemp(prefix="phalanx-", dir="/tmp"))
        self.agent = RankServer(self.folder / "agent.sock", job_store(self.job), HORIZON)
        self.agent.start()
        self._forks = server

    def start(self) -> tuple[Gang, int]:
        prepared = self.prepared
        attempt = self.lineage.open_attempt(
            code_digest=prepared.code_digest,
            identity_digest=prepared.identity_digest,
            placement=self.job.placement(prepared.layout.world_size),
        ).number
        place = {"socket": str(self.agent.socket), "job": JOB, "attempt": attempt}
        arguments = to_arguments(prepared) | {"debug_rank": None, "agent": place}
        folder = self.folder / f"attempt-{attempt}"
        order = GangOrder(prepared.layout.world_size, ENTRY, folder, arguments, attempt=attempt)
        return self._forks.start(order), attempt

    def run(self, on_event: Callable[[Run, Event], None] = lambda run, event: None) -> Run:
        """One attempt to its end; a hang fails the test."""
        gang, _ = self.start()
        run, watch = Run(self.job, gang), Watch(gang.order.world_size)
        try:
            for event in gang.events(PATIENCE_S):
                watch.observe(event)
                run.events.append(event)
                assert not watch.late(time.monotonic()), watch.cause(time.monotonic(), gang.stacks(5.0))
                on_event(run, event)
            assert gang.over, gang.stacks(5.0)
        finally:
            run.outcome = gang.end(0.0)
        return run

    def close(self) -> None:
        self.agent.stop()
        shutil.rmtree(self.folder)


@pytest.fixture
def node(tmp_path: Path, corpus: str, server: ForkServer) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*overrides: str, steps: int = 10) -> Node:
        made.append(Node(write_job(tmp_path, corpus, steps=steps), server, *overrides))
        return made[-1]

    yield make
    for each in made:
        each.close()


def outcome_of(run: Run) -> GangOutcome:
    assert run.outcome is not None
    return run.outcome


def step_of(event: Event) -> int:
    return int(event.fields["step"]) if event.kind == "progress" else 0


def test_gang_beside_an_agent_trains_to_its_end_and_proves_it(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node()
    run = here.run()
    assert outcome_of(run).ok, outcome_of(run).first_cause
    assert [event.fields["step"] for event in run.of("committed")] == [2, 4, 6, 8, 10]
    assert here.agent.calls.count("Open") == 1 and here.agent.calls.count("Renew") == 2
    phases = {rank: [e.fields["name"] for e in run.of("phase") if e.rank == rank] for rank in (0, 1)}
    assert phases[0] == phases[1] and phases[0][:4] == ["init", "plan", "init", "first_step"]
    assert_proven(tmp_path / "job.toml", 10)


def test_each_rank_tells_how_long_it_works_on_a_step_beside_an_agent(node: Callable[..., Node]) -> None:
    run = node().run()
    told = {(event.rank, event.fields["step"]): event.fields for event in run.of("step_time")}
    assert set(told) == {(rank, step) for rank in (0, 1) for step in range(EVERY_STEPS, 11, EVERY_STEPS)}
    assert all(0 < fields["busy_s"] <= fields["step_time_s"] * 1.5 for fields in told.values())


@pytest.mark.parametrize(("interval", "phase"), [(100, "plan"), (2, "commit")])
def test_agent_away_is_waited_for_and_no_hang(
    node: Callable[..., Node], tmp_path: Path, interval: int, phase: str
) -> None:
    here = node("deadlines.step_s=3.0", "deadlines.save_s=60.0", f"checkpoint.interval={interval}")
    waiting, back = threading.Event(), threading.Event()

    def leave_and_return() -> None:
        here.agent.stop()
        assert waiting.wait(PATIENCE_S)
        back.wait(4.0)  # longer than any step may take
        here.agent.start()
        back.set()

    outsider = threading.Thread(target=leave_and_return)

    def on_event(run: Run, event: Event) -> None:
        if step_of(event) == 1:
            outsider.start()
        if event.kind == "phase" and event.rank == 0 and (event.fields["name"], event.fields["step"]) in HELD_UP[phase]:
            waiting.set()

    run = here.run(on_event)
    assert outcome_of(run).ok, outcome_of(run).first_cause
    assert back.is_set()
    assert_proven(tmp_path / "job.toml", 10)


def test_stop_order_commits_and_the_next_attempt_goes_on(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node(steps=30)

    def on_event(run: Run, event: Event) -> None:
        if step_of(event) == 3:
            here.agent.give(pb.RANK_ORDER_STOP)

    run = here.run(on_event)
    (stopped,) = {event.fields["step"] for event in run.of("stopped")}
    assert 3 <= stopped < 30 and here.lineage.checkpoints()[-1] == CheckpointRef(1, stopped)
    here.agent._orders.clear()
    again = here.run()
    assert outcome_of(again).ok and {e.fields["step"] for e in again.of("opened")} == {stopped}
    assert_proven(tmp_path / "job.toml", 30)


def test_checkpoint_order_commits_and_the_gang_goes_on(node: Callable[..., Node]) -> None:
    here = node("checkpoint.interval=100", steps=20)

    def on_event(run: Run, event: Event) -> None:
        if step_of(event) == 3:
            here.agent.give(pb.RANK_ORDER_CHECKPOINT)

    run = here.run(on_event)
    steps = [event.fields["step"] for event in run.of("committed")]
    assert outcome_of(run).ok and len(steps) == 2 and 3 <= steps[0] < 20 and steps[1] == 20


def test_superseded_gang_ends_with_that_cause(node: Callable[..., Node]) -> None:
    here = node(steps=100000)

    def on_event(run: Run, event: Event) -> None:
        if step_of(event) == 3:
            here.lineage.open_attempt(
                code_digest=here.prepared.code_digest, identity_digest=here.prepared.identity_digest, placement={}
            )

    cause = outcome_of(here.run(on_event)).first_cause
    assert cause is not None and (cause.kind, cause.rank) == ("superseded", 0), cause


def test_damaged_shard_is_reported_and_is_the_cause(
    node: Callable[..., Node], tmp_path: Path, corpus: str, server: ForkServer
) -> None:
    data = tmp_path / "data"
    shutil.copytree(corpus.removeprefix("file://"), data)
    for tar in (data / "train").rglob("*.tar"):
        tar.write_bytes(bytes(len(tar.read_bytes())))
    here = node(f'data.train="{(data / "train").as_uri()}"')
    here.agent.decision = data_pb.DAMAGE_ACTION_SKIP
    run = here.run()
    cause = outcome_of(run).first_cause
    assert cause is not None and cause.kind == "bad_shard" and ".tar" in cause.message
    assert {event.fields["step"] for event in run.of("bad_shard")} == {1}
    assert here.agent.shards and {step for _, _, step in here.agent.shards} == {1}
