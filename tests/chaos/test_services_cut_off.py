"""An agent that is cut off from the services: for a minute, and for longer than it is waited for."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.jobs import Command, assert_proven, job_folder, lineage_of, losses_of, run_cli, wait_until, write_job
from support.services import Services, resized, services, wait_for_step
from support.tcp_proxy import network

from phalanx.api.agent.v1.record_pb2 import Record
from phalanx.api.train.v1 import train_service_pb2 as pb
from phalanx.home.layout import SERVICES
from phalanx.lineage.events import EventType, JobState
from phalanx.rpc import read_client, read_service, write_config
from phalanx.rpc.tokens import Role
from phalanx.train.client import connect_train

FAR = 1_000_000
HORIZON_STEPS, CUT_S = 150, 60.0
LOST_S = 6.0
TOLD = re.compile(r"tiny attempt 1 (is superseded|is to end: attempt 2 is the newest)")


def records_of(running: Services, attempt: int) -> list[Record]:
    """What ranks have told train of an attempt, as the monitor reads it."""
    context = read_client(running.home.client)
    credentials = replace(context.security, token=running.home.token(Role.SERVICE))
    found: list[Record] = []
    with (
        connect_train(context.services["train"], credentials) as client,
        client._stub.WatchRecords(pb.WatchRecordsRequest(), timeout=20) as stream,  # type: ignore[attr-defined]
    ):
        for message in stream:
            if message.WhichOneof("message") is None:  # a sign of life: everything that is there was read
                break
            if message.WhichOneof("message") == "record" and message.record.attempt == attempt:
                found.append(message.record)
    return found


@pytest.mark.timeout(420)
def test_run_that_is_cut_off_for_a_minute_goes_on_to_its_horizon_waits_and_continues(
    corpus: str, tmp_path: Path
) -> None:
    path = resized(write_job(tmp_path, corpus, steps=2 * HORIZON_STEPS), ("interval = 2", "interval = 100000"))
    calm = resized(path, name="calm")
    with services(tmp_path / "home", slots=2) as running, running.client() as client, network() as between:
        running.configure("data", horizon_steps=HORIZON_STEPS)
        running.route_agent(between, SERVICES)
        client.submit(path)
        wait_for_step(client, "tiny", 10)
        between.cut()
        cut_at, cut_s = time.time(), time.monotonic()
        ranks = running.ranks()
        assert run_cli(["run", calm]).code == 0  # undisturbed, meanwhile
        wait_until(lambda: time.monotonic() - cut_s > CUT_S, CUT_S + 5, "a minute is not over")
        assert running.ranks() == ranks
        seen = client.job("tiny")
        assert seen.state is JobState.RUNNING and seen.attempt == 1 and seen.step < HORIZON_STEPS, seen
        between.mend()
        mended_at = time.time()
        done = client.wait("tiny", 90)
        assert (done.state, done.attempt, done.step) == (JobState.SUCCEEDED, 1, 2 * HORIZON_STEPS), done
        told = records_of(running, 1)
    alone = [each for each in told if cut_at + 2 < each.time.ToMicroseconds() / 1e6 < mended_at]
    steps = [each.progress.step for each in alone if each.WhichOneof("event") == "progress"]
    print(f"cut off: steps {min(steps)} to {max(steps)}")  # noqa: T201
    assert max(steps) == HORIZON_STEPS
    waits = [each for each in alone if each.WhichOneof("event") == "phase" and each.phase.name == "plan"]
    assert {each.rank for each in waits if each.phase.step == HORIZON_STEPS} <= {0, 1}
    after = [
        each for each in told if each.WhichOneof("event") == "progress" and each.progress.step == HORIZON_STEPS + 1
    ]
    assert after and after[0].time.ToMicroseconds() / 1e6 > mended_at - 1
    last = max(each.time.ToMicroseconds() / 1e6 for each in waits)
    print(f"waited {after[0].time.ToMicroseconds() / 1e6 - last:.1f} s in plan")  # noqa: T201
    assert losses_of(path) == losses_of(calm)
    assert_proven(path, 2 * HORIZON_STEPS)


@contextmanager
def second_agent(running: Services, folder: Path) -> Iterator[Command]:
    """An agent of another node, which reaches the services as they are."""
    config = read_service(running.home.config("agent"))
    services_ = read_client(running.home.client).services
    options = {**config.options, "state_dir": str(folder), "node": "second"}
    path = folder.with_suffix(".toml")
    write_config(path, replace(config, services=services_, metrics="", options=options))
    with Command([sys.executable, "-m", "phalanx.agent", "--config", path]) as agent:
        yield agent
        agent.signal(signal.SIGTERM)
        assert agent.finish().code == 0
        agent.wait_until_nothing_lives()


@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    "cut_from",
    [pytest.param(SERVICES, id="everything"), pytest.param(("train",), id="train alone")],
)
def test_zombie_that_was_cut_off_is_never_live_is_told_and_ends_itself(
    corpus: str, tmp_path: Path, cut_from: tuple[str, ...]
) -> None:
    """Checkpoint case 14."""
    path = write_job(tmp_path, corpus, steps=FAR)
    with services(tmp_path / "home", slots=2) as running, running.client() as client, network() as between:
        running.route_agent(between, cut_from)
        running.configure("train", agent_lost_s=LOST_S)
        client.submit(path)
        wait_for_step(client, "tiny", 4)
        with second_agent(running, tmp_path / "second"):
            wait_until(lambda: len(client.nodes()) == 2, 30, "the second agent is not there")
            zombies = running.ranks()
            agent = running.state.process("agent")
            assert len(zombies) == 2
            between.cut()

            def is_elsewhere() -> bool:
                job = client.job("tiny")
                return job.attempt == 2 and job.state is JobState.RUNNING

            wait_until(is_elsewhere, 60, "no second attempt")
            assert [each.node_id for each in client.job("tiny").placement] == ["second"]
            wait_for_step(client, "tiny", client.job("tiny").step + 4)
            if cut_from == SERVICES:
                assert alive(zombies) == zombies
                between.mend()
            wait_until(lambda: not alive(zombies), 40, "the zombie's ranks live on")
            between.mend()
            wait_until(lambda: all(node.node.is_connected for node in client.nodes()), 20, "the first does not return")
            assert running.state.process("agent") == agent, "it ended by itself, and its agent lives"
            assert TOLD.search(running.home.log("agent").read_text())
            job = client.job("tiny")
            assert (job.attempt, job.state) == (2, JobState.RUNNING), job
            client.stop("tiny")
            steps = client.wait("tiny", 60).step + 4
            client.resume("tiny", [f"training.steps={steps}"])
            done = client.wait("tiny", 60)
            assert done.state is JobState.SUCCEEDED, done
            events = []
            for event in client.watch("tiny"):
                events.append(event)
                if event.revision == done.revision:
                    break
    (lost,) = (event for event in events if event.type is EventType.RECOVERING)
    assert lost.cause is not None and lost.cause.kind == "node_loss", lost
    lineage = lineage_of(path)
    parent = lineage.attempts()[1].parent
    assert parent is not None and parent.attempt == 1
    live = lineage.checkpoints()
    assert max(ref.step for ref in live if ref.attempt == 1) == parent.step
    late = [each.name for each in job_folder(path).glob("a*1/s*") if int(each.name[1:]) > parent.step]
    print(f"cut from {cut_from}: parent {parent}, what the zombie left: {late}")  # noqa: T201
    assert_proven(path, steps)


def alive(pids: tuple[int, ...]) -> tuple[int, ...]:
    """Those that live and are no zombies in the kernel's sense."""

    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return tuple(pid for pid in pids if lives(pid))
