"""The ordinary way through the services, by the command line alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import (
    PHALANX,
    PREPARE,
    Command,
    assert_proven,
    lineage_of,
    losses_of,
    run_cli,
    wait_until,
    write_corpus,
    write_job,
)
from support.services import Services, resized, services, wait_for_step

from phalanx import Client
from phalanx.home.layout import SERVICES, Home

FAR = 1_000_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with services(Path(tmp_path_factory.mktemp("up")) / "home", slots=4) as running:
        yield running


def following(running: Services, *arguments: str) -> Command:
    return Command([PHALANX, *arguments], {"PHALANX_CONTEXT": str(running.home.client)})


def _assert_page_tells_what_is_saved(running: Services, client: Client, job: str) -> None:
    """The figures of a run of four steps with a checkpoint each two: as the checkpoint service has them, and as rank 0
    has measured them.
    """
    client.checkpoint.pin(job, "2", "to be seen")
    listed = {view.ref.step: view for view in client.checkpoint.list(job).checkpoints}

    def told() -> dict[str, Any]:
        return running.page("run", job=job)

    wait_until(lambda: told()["attempts"][0]["pinned"] == [2], 60, "the page does not show the pin")
    wait_until(lambda: "stall_s" in told()["summary"]["saves"], 60, "the page does not show what a save cost")
    run = told()
    (attempt,), saves = run["attempts"], run["summary"]["saves"]
    assert (attempt["checkpoints"], attempt["damaged"], attempt["live"]) == ([2, 4], [], True)
    assert (saves["attempt"], saves["step"], saves["num_skipped"]) == (1, 4, 0)
    assert saves["num_bytes"] == listed[4].num_bytes > 0
    assert 0 < saves["age_s"] < 300 and 0 < saves["stall_s"] < 60


@pytest.mark.timeout(480)
def test_job_goes_its_way_through_every_command_and_a_restart_of_everything(corpus: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus, steps=FAR)
    home = tmp_path / "home"
    with services(home, slots=4) as running:
        assert running.told("job", "submit", path, "--dry-run")["dry_run"]
        assert running.told("job", "ls")["jobs"] == []
        submitted = running.told("job", "submit", path, "--request-id", "once")
        assert (submitted["name"], submitted["state"]) == ("projects/default/jobs/tiny", "queued")
        assert running.told("job", "submit", path, "--request-id", "once")["name"] == submitted["name"]
        any_of = [word for state in ("queued", "preparing", "starting", "running") for word in ("--state", state)]
        (mine,) = running.told("job", "ls", "--mine", *any_of)["jobs"]
        assert mine["owner"] == submitted["owner"] != ""
        assert running.told("job", "ls", "--state", "stopped")["jobs"] == []
        with (
            running.client() as client,
            following(running, "job", "watch", "tiny", "--json") as watch,
            following(running, "job", "logs", "tiny", "-f", "--rank", "1") as logs,
        ):
            wait_for_step(client, "tiny", 4)
            (node,) = running.told("nodes")["nodes"]
            assert (node["connected"], node["slots"], node["free_slots"]) == (True, 4, 2)
            stacks = running.told("job", "stack", "tiny")
            assert set(stacks) == {"0", "1"} and all("forward" in text or "File" in text for text in stacks.values())
            revision = running.told("job", "checkpoint", "tiny")["revision"]
            (asked,) = [event for event in _events(running, until=revision) if event["revision"] == revision]
            assert asked["type"] == "checkpoint_requested" and asked["actor"] == submitted["owner"]
            name = submitted["name"]
            pinned = running.told("checkpoint", "pin", name, "2", "--reason", "to be forked from")
            assert "2" in json.dumps(pinned)
            would = json.dumps(running.told("checkpoint", "prune", name, "--dry-run"))
            assert "keep" in would or "remov" in would
            running.told("job", "stop", "tiny")
            assert running.told("job", "wait", "tiny", code=1)["state"] == "stopped"
            stopped = running.told("job", "show", "tiny")
            assert stopped["checkpoint"]["step"] == stopped["step"] > 4
            watched = watch.finish()
            assert watched.code == 1, watched.err
            revisions = [json.loads(line)["revision"] for line in watched.out.splitlines()]
            assert revisions == list(range(1, stopped["revision"] + 1))
            assert logs.finish().code == 0
            committed = {ref.step for ref in lineage_of(path).checkpoints()}
            assert 2 in committed

            step = stopped["step"]
            alone = ("--set", "cluster.nproc=1")
            running.told("job", "resume", "tiny", *alone)
            wait_for_step(client, "tiny", step + 4)
            assert running.told("job", "show", "tiny")["placement"] == {node["node"]: [0]}
            running.told("job", "suspend", "tiny")
            wait_until(lambda: client.job("tiny").state == "suspended", 30, "not suspended")
            running.told("job", "resume", "tiny")
            suspended = client.job("tiny").step
            wait_for_step(client, "tiny", suspended + 4)
        assert run_cli(["down", "--home", home, "--json"]).code == 0
        assert running.command.finish().code == 0

    assert run_cli(["status", "--home", home, "--json"]).code == 1
    before = lineage_of(path).checkpoints()[-1].step
    with services(home, slots=4) as running, running.client() as client:
        wait_for_step(client, "tiny", before + 4)
        running.told("job", "stop", "tiny")
        running.told("job", "wait", "tiny", code=1)
        end = running.told("job", "show", "tiny")["step"] + 6
        running.told("job", "resume", "tiny", "--set", f"training.steps={end}", "--set", "cluster.nproc=2")
        done = running.told("job", "wait", "tiny")
        assert (done["state"], done["step"]) == ("succeeded", end)
        forked = running.told(
            "job", "submit", "--from", "tiny@2", "--set", "optimizer.lr=0.5", "--set", "training.steps=6"
        )
        assert forked["name"] == "projects/default/jobs/tiny-2"
        assert running.told("job", "wait", "tiny-2")["step"] == 6
        version = running.told("data", "register", "words", corpus)
        assert (version["dataset"], version["version"]) == ("words", 1)
        assert running.told("data", "register", "words", corpus)["version"] == 1
        assert [job["name"][-6:] for job in running.told("job", "ls", "--state", "succeeded")["jobs"]] == [
            "tiny-2",
            "s/tiny",
        ]
    assert_proven(path, end)
    assert end not in losses_of(resized(path, name="tiny-2"))


def _events(running: Services, until: int) -> list[dict[str, object]]:
    """The events up to a revision, as the command prints them."""
    with following(running, "job", "watch", "tiny", "--json") as watch:
        watch.wait_for(f'"revision": {until},', stream="out")
        return [json.loads(line) for line in watch.lines("out")]


@pytest.mark.timeout(480)
def test_jobs_share_slots_and_the_one_that_waits_says_for_what(corpus: str, tmp_path: Path, shared: Services) -> None:
    path = write_job(tmp_path, corpus, steps=FAR)
    first, second, third = (resized(path, name=name) for name in ("first", "second", "third"))
    with shared.client() as client:
        for each in (first, second):
            shared.told("job", "submit", each)
        for name in ("first", "second"):
            wait_for_step(client, name, 2)
        shared.told("job", "submit", resized(third, ("steps = 1000000", "steps = 4")))
        wait_until(lambda: "waits for 2 slots: 0 are free" in client.job("third").message, 20, "no word of slots")
        (waiting,) = shared.told("job", "ls", "--state", "queued")["jobs"]
        assert "waits for 2 slots: 0 are free" in waiting["message"], waiting
        assert shared.told("nodes")["nodes"][0]["free_slots"] == 0
        shared.told("job", "stop", "first")
        assert shared.told("job", "wait", "third")["state"] == "succeeded"
        _assert_page_tells_what_is_saved(shared, client, "projects/default/jobs/third")
        shared.told("job", "stop", "second")
        shared.told("job", "wait", "second", code=1)
    assert_proven(third, 4)


@pytest.mark.timeout(480)
def test_services_and_a_job_on_s3_by_the_same_commands(s3_prefix: str, ministack: str, tmp_path: Path) -> None:
    prepared = run_cli(["data", "prepare", write_corpus(tmp_path / "text"), "--out", f"{s3_prefix}/data", *PREPARE])
    assert prepared.code == 0, prepared.err
    path = write_job(tmp_path, f"{s3_prefix}/data", steps=8)
    path.write_text(path.read_text().replace(f"{tmp_path.as_uri()}/store", f"{s3_prefix}/store"))
    home = Home(tmp_path / "home")
    up = ["up", "-d", "--home", home.folder, "--port-base", "0", "--slots", "2", "--storage", f"{s3_prefix}/cluster"]
    with Command([PHALANX, *up, "--storage-endpoint", ministack, "--json"]) as command:
        started = command.finish()
        assert started.code == 0, started.err
        assert {each["name"] for each in json.loads(started.out)["processes"]} == {*SERVICES, "agent"}
        running = Services(home, command)
        running.told("job", "submit", path)
        running.kill("checkpoint")
        assert running.told("job", "wait", "tiny")["step"] == 8
        assert json.loads(run_cli(["down", "--home", home.folder, "--json"]).out)["was_up"]
        command.wait_until_nothing_lives()
    proof = json.loads(run_cli(["data", "verify", path, "--json"]).out)
    assert proof["ok"] and proof["steps"] == 8


@pytest.mark.timeout(480)
def test_stack_tells_of_a_rank_that_is_stopped(corpus: str, tmp_path: Path, shared: Services) -> None:
    with shared.client() as client:
        client.submit(resized(write_job(tmp_path, corpus, steps=FAR), name="mute"))
        wait_for_step(client, "mute", 2, 120)
        one = shared.ranks()[0]
        os.kill(one, signal.SIGSTOP)
        try:
            found = shared.told("job", "stack", "mute", code=1)
            ((rank, why),) = found.pop("missing").items()
            assert set(found) == {"0", "1"} and found.pop(rank) is None and "File" in "".join(found.values())
            said = shared.cli("job", "stack", "mute", "--rank", rank, code=1)
            assert said.out == "" and said.err.startswith(f"phalanx: rank {rank}: no stack within ")
            assert "SIGSTOP" in why
        finally:
            os.kill(one, signal.SIGCONT)
        client.stop("mute")
        client.wait("mute", 120)
