"""The supervisor is killed, or its ranks cannot commit: nothing is lost without a word, and the home starts again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.jobs import PHALANX, Command, assert_proven, lineage_of, run_cli, wait_until, write_job
from support.services import Services, services, wait_for_step

from phalanx.home.layout import Home
from phalanx.home.places import living

FAR = 1_000_000


def started(home: Path, command: Command) -> Services:
    running = Services(Home(home), command)
    running.wait_ready()
    return running


@pytest.mark.timeout(300)
def test_supervisor_killed_during_a_run_commits_and_the_next_up_takes_over(corpus: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus, steps=FAR)
    path.write_text(path.read_text().replace("interval = 2", "interval = 1000000"))
    home = tmp_path / "home"
    with Command([PHALANX, "up", "--home", home, "--port-base", "0", "--slots", "2"]) as command:
        running = started(home, command)
        with running.client() as client:
            client.submit(path)
            wait_for_step(client, "tiny", 3)
        assert not lineage_of(path).checkpoints()
        command.signal(signal.SIGKILL)
        command.finish()
        told = run_cli(["status", "--home", home, "--json"])
        assert told.code == 1 and not json.loads(told.out)["up"], told
        with services(home, slots=2) as again, again.client() as client:
            committed = lineage_of(path).checkpoints()[-1].step
            assert committed >= 3
            wait_for_step(client, "tiny", committed + 3)
            assert client.job("tiny").attempt >= 2
            client.stop("tiny")
            end = client.wait("tiny", 60).step
    assert_proven(path, end)


@pytest.mark.timeout(200)
def test_down_after_the_supervisor_was_killed_ends_what_it_left(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with Command([PHALANX, "up", "--home", home, "--port-base", "0", "--slots", "1"]) as command:
        running = started(home, command)
        agent = running.kill("agent", signal.SIGSTOP)
        command.signal(signal.SIGKILL)
        command.finish()
        told = run_cli(["status", "--home", home])
        assert told.code == 1 and "agent" in told.out and "was killed" in told.err, told
        os.kill(agent, signal.SIGCONT)
        told = run_cli(["down", "--home", home, "--json"])
        assert told.code == 0 and json.loads(told.out)["was_up"], told
        assert living(Home(home)) == ()
        command.wait_until_nothing_lives(5)


@pytest.mark.timeout(200)
def test_down_that_had_to_kill_ranks_says_what_was_lost(corpus: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus, steps=FAR)
    home = tmp_path / "home"
    words = ["up", "--home", home, "--port-base", "0", "--slots", "2", "--agent-grace", "3"]
    with Command([PHALANX, *words]) as command:
        running = started(home, command)
        with running.client() as client:
            client.submit(path)
            wait_for_step(client, "tiny", 3)
        for rank in running.ranks():
            os.kill(rank, signal.SIGSTOP)
        told = run_cli(["down", "--home", home, "--json"])
        assert told.code == 1, told
        (lost,) = json.loads(told.out)["lost"]
        assert "jobs/tiny" in lost and "killed before they had committed" in lost and lost in told.err
        assert "its ranks commit first, for 3 s at most" in told.err
        finished = command.finish()
        assert finished.code == 1 and lost in finished.err
        command.wait_until_nothing_lives(30)  # a fork server for the next attempt ends once it has imported torch


@pytest.mark.timeout(200)
def test_up_on_the_ports_of_another_home_names_the_process_and_starts_nothing(tmp_path: Path) -> None:
    with services(tmp_path / "first", "--no-agent") as first:
        page = first.state.page_url
        base = next(
            int(line.rpartition(":")[2].strip('"')) for line in _lines(first.home.config("data")) if '"listen"' in line
        )
        told = run_cli(["up", "-d", "--home", tmp_path / "second", "--port-base", str(base - 1), "--no-agent"])
        assert told.code == 2 and f"127.0.0.1:{base}" in told.err and "data" in told.err, (told, page)
        assert len([line for line in told.err.splitlines() if line.startswith("phalanx: ")]) == 1
        assert living(Home(tmp_path / "second")) == ()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.timeout(200)
def test_agent_from_a_copied_folder_with_its_own_addresses_joins(tmp_path: Path) -> None:
    """As `docs/services.md` says under "Several machines"."""
    files = ("agent.toml", "pki/ca.crt", "pki/agent.crt", "pki/agent.key", "keys/token.pub", "tokens/agent.token")
    with services(tmp_path / "home", "--no-agent") as running, running.client() as client:
        node = tmp_path / "elsewhere" / "node"
        for name in files:
            (node / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(running.home.folder / name, node / name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))
            metrics = f"127.0.0.2:{probe.getsockname()[1]}"
        text = "".join(
            f'"metrics" = "{metrics}"\n' if line.startswith('"metrics"') else f"{line}\n"
            for line in _lines(node / "agent.toml")
        )
        assert str(tmp_path) not in text
        (node / "agent.toml").write_text(text.replace('["options"]\n', '["options"]\n"address" = "127.0.0.2"\n'))
        agent = subprocess.Popen(
            [sys.executable, "-m", "phalanx.agent", "--config", node / "agent.toml"],
            cwd=tmp_path,
            start_new_session=True,
        )
        try:
            wait_until(
                lambda: [each for each in client.nodes() if each.node.is_connected], 60, "the node does not join"
            )
            assert (node / "agent" / "node-id").exists()
        finally:
            agent.terminate()
            with suppress(subprocess.TimeoutExpired):
                agent.wait(30)
            agent.kill()
            agent.wait()
