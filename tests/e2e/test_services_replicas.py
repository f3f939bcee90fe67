"""Steps that nodes keep in memory for each other: a run that loses a node goes on from there, and the proof holds."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from support.agents import ExtraAgent, extra_agent
from support.jobs import assert_proven, every_manifest_holds, lineage_of, wait_until, write_job
from support.services import Services, resized, services, wait_for_step

from phalanx import Client
from phalanx.lineage.events import EventLog, EventType, JobState
from phalanx.spec import load_job
from phalanx.trainer.places import job_store

FAR, DEADLINE_S = 1_000_000, 150.0
pytestmark = pytest.mark.timeout(600)


def memory_job(folder: Path, corpus: str, interval: int = FAR) -> Path:
    """A job on two nodes of one rank each that copies every step."""
    path = write_job(folder, corpus, steps=FAR)
    return resized(path, ("interval = 2", f"interval = {interval}\nmemory_interval = 1"))


def restarted_from(path: Path, attempt: int) -> int:
    """The step that an attempt went on from, once it is opened."""
    wait_until(
        lambda: any(each.number == attempt for each in lineage_of(path).attempts()), DEADLINE_S, "no new attempt"
    )
    return next(each.start_step for each in lineage_of(path).attempts() if each.number == attempt)


def stopped_and_proven(client: Client, path: Path) -> None:
    """The job stops with a checkpoint, and every step of its chain is proven."""
    client.stop("tiny")
    done = client.wait("tiny", 60)
    assert done.state is JobState.STOPPED, done
    every_manifest_holds(path)
    newest = lineage_of(path).checkpoints()[-1]
    assert newest.step == done.step
    assert_proven(path, done.step)


def incidents(path: Path) -> list[str]:
    """What was told of steps in memory."""
    log = EventLog(job_store(load_job(path))).after(0)
    return [event.message for event in log if event.type is EventType.INCIDENT and "memory" in event.message]


def begun(client: Client, path: Path, step: int = 8) -> None:
    client.submit(path)
    wait_for_step(client, "tiny", step, DEADLINE_S)


def lose_one(running: Services, client: Client, path: Path, other: ExtraAgent) -> int:
    """SIGKILL to the agent of a node, then a new one in its place; the step from which the run goes on."""
    other.kill()
    other.start()
    found = restarted_from(path, 2)
    wait_for_step(client, "tiny", found + 3, DEADLINE_S)
    return found


def assert_restored_from_memory(other: ExtraAgent, field: str) -> None:
    """The rank of that node in attempt 2 had bytes from there, and none from storage that lay in memory."""
    text = "".join(other.rank_log(2, rank).read_text() for rank in (0, 1))
    assert re.search(rf"{field} [1-9]", text) and "storage_bytes" not in text, text


def assert_no_memory_left(*pids: int) -> None:
    """Agents hold no memory of jobs any more."""

    def is_memory(file: Path) -> bool:
        try:
            return str(file.readlink()).startswith("/memfd:phalanx")
        except FileNotFoundError:  # closed since the folder was listed
            return False

    def held() -> list[Path]:
        return [file for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir() if is_memory(file)]

    wait_until(lambda: not held(), DEADLINE_S, "memory of the job is left")


def met(other: ExtraAgent, point: str) -> int:
    """The step that was sealed when an agent of `doomed_agent` came to that point."""
    found = re.compile(rf"doomed: {point} step \d+ sealed (\d+)")
    wait_until(lambda: found.search(other.log.read_text()), DEADLINE_S, f"the agent did not come to {point}")
    return max(int(sealed) for sealed in found.findall(other.log.read_text()))


@pytest.mark.parametrize(
    ("first", "then"), [("push", ("rank", "store")), ("seal", ("give",))], ids=["push-rank-store", "seal-give"]
)
def test_run_whose_agent_is_killed_at_a_point_loses_no_sealed_step(
    corpus: str, tmp_path: Path, first: str, then: tuple[str, ...]
) -> None:
    path = memory_job(tmp_path, corpus)
    with (
        services(tmp_path / "home", slots=1) as running,
        extra_agent(running, "b", dies_at=(first,)) as other,
        running.client() as client,
    ):
        client.submit(path)
        sealed = met(other, first)
        other.wait_dead()
        other.dies_at = then
        other.start()
        assert restarted_from(path, 2) >= sealed
        if then == ("give",):  # the first that asks is the node of the one that was killed: it holds nothing
            wait_for_step(client, "tiny", sealed + 6, DEADLINE_S)
            running.restart("agent")
        sealed = met(other, then[-1]) or sealed
        other.wait_dead()
        other.dies_at = ()
        other.start()
        newest = 4 if then == ("give",) else 3
        found = restarted_from(path, newest)
        assert found >= sealed
        wait_for_step(client, "tiny", found + 3, DEADLINE_S)
        assert incidents(path) == []
        stopped_and_proven(client, path)
        assert_no_memory_left(running.state.process("agent").pid, other.pid)


def test_run_that_loses_a_node_goes_on_from_memory_and_is_proven(corpus: str, tmp_path: Path) -> None:
    path = memory_job(tmp_path, corpus)
    with (
        services(tmp_path / "home", slots=1) as running,
        extra_agent(running, "b") as other,
        running.client() as client,
    ):
        begun(client, path)
        assert lineage_of(path).checkpoints() == (), "nothing is in storage"
        found = lose_one(running, client, path, other)
        assert found >= 4, "copies of the first steps lie in memory"
        logs = "".join(each.read_text() for each in running.home.agent_state.glob("ranks/*/*/attempt-2/rank*.log"))
        assert "lie in the memory of this node" in logs and " 0 objects" not in logs, logs
        assert_restored_from_memory(other, "holder_bytes")
        assert incidents(path) == []
        stopped_and_proven(client, path)
        assert_no_memory_left(running.state.process("agent").pid, other.pid)


def test_run_that_loses_both_nodes_goes_on_from_storage(corpus: str, tmp_path: Path) -> None:
    path = memory_job(tmp_path, corpus, interval=4)
    with (
        services(tmp_path / "home", slots=1) as running,
        extra_agent(running, "b") as other,
        running.client() as client,
    ):
        begun(client, path, 6)
        wait_until(lambda: bool(lineage_of(path).checkpoints()), DEADLINE_S, "no checkpoint in storage")
        other.kill()
        running.kill("agent")
        stored = {ref.step for ref in lineage_of(path).checkpoints()}
        other.start()
        found = restarted_from(path, 2)
        assert found % 4 == 0 and found >= max(stored), "only checkpoints of storage are left"
        wait_for_step(client, "tiny", found + 3, DEADLINE_S)
        stopped_and_proven(client, path)


def test_rank_that_dies_costs_no_step_that_lies_in_memory(corpus: str, tmp_path: Path) -> None:
    path = memory_job(tmp_path, corpus)
    with services(tmp_path / "home", slots=2) as running, running.client() as client:
        begun(client, path)
        os.kill(running.ranks()[0], signal.SIGKILL)
        found = restarted_from(path, 2)
        assert found >= 4
        wait_for_step(client, "tiny", found + 3, DEADLINE_S)
        stopped_and_proven(client, path)
