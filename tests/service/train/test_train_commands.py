"""`phalanx job ...` against train and an agent: what ranks don't answer, and refusals in the words of the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import pytest
from train_kit import World, tables

from phalanx.cli.entry import main
from phalanx.rpc import ClientConfig, Role
from phalanx.rpc.config import write_config
from phalanx.train.client import JobState, TrainClient

Say = Callable[..., tuple[int, str, list[str]]]
HUGE = "9" * 23


@pytest.fixture
def say(world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Say:
    """`phalanx job ARGUMENTS...` as an operator: exit code, stdout, lines of stderr."""
    context = world.folder / "client.toml"
    write_config(context, ClientConfig({"train": world.config.listen}, world.cluster.credentials(Role.OPERATOR)))
    monkeypatch.setenv("PHALANX_CONTEXT", str(context))

    def said(*arguments: str) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["phalanx", "job", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ending:
            main()
        out, err = capfd.readouterr()
        return int(ending.value.code or 0), out, err.splitlines()

    return said


@pytest.fixture
def running(world: World, client: TrainClient) -> Iterator[None]:
    """A job of four ranks on two nodes, of which 0 and 3 give no stack."""
    client.submit(tables(world.storage, nproc=4))
    with world.agent("n1", mute=frozenset({0, 3})), world.agent("n2", mute=frozenset({0, 3})):
        client.wait("tiny", until=(JobState.RUNNING,), timeout_s=20)
        yield


def refusal(found: tuple[int, str, list[str]]) -> str:
    code, out, lines = found
    assert (code, out, len(lines)) == (2, "", 1), found
    return lines[0]


@pytest.mark.usefixtures("running")
def test_stack_tells_each_rank_that_gives_none(say: Say) -> None:
    code, out, lines = say("stack", "tiny")
    assert (code, out) == (1, "== rank 1\nstack of rank 1\n== rank 2\nstack of rank 2\n")
    assert [line.partition(" within ")[0] for line in lines] == [f"phalanx: rank {rank}: no stack" for rank in (0, 3)]

    code, out, lines = say("stack", "tiny", "--json")
    told = json.loads(out)
    assert code == 1 and len(lines) == 2
    assert [told[str(rank)] for rank in range(4)] == [None, "stack of rank 1", "stack of rank 2", None]
    assert set(told["missing"]) == {"0", "3"} and told["missing"]["0"] in lines[0]


@pytest.mark.usefixtures("running")
def test_stack_tells_only_of_the_ranks_asked_for(say: Say) -> None:
    assert say("stack", "tiny", "--rank", "2") == (0, "== rank 2\nstack of rank 2\n", [])
    code, out, _ = say("stack", "tiny", "--rank", "2", "--rank", "1", "--json")
    assert (code, json.loads(out)) == (0, {"1": "stack of rank 1", "2": "stack of rank 2"})
    code, out, (line,) = say("stack", "tiny", "--rank", "0")
    assert (code, out) == (1, "") and line.startswith("phalanx: rank 0: no stack within ")
    code, out, _ = say("stack", "tiny", "--rank", "3", "--json")
    assert code == 1 and json.loads(out)["3"] is None and set(json.loads(out)) == {"3", "missing"}


@pytest.mark.usefixtures("running")
def test_refusals_name_the_option_and_what_there_is(say: Say) -> None:
    for rank in ("4", HUGE, "-1"):
        assert f"--rank is {rank}: expected a rank from 0 to 3" in refusal(say("stack", "tiny", "--rank", rank))
    assert "--rank is 4: expected a rank of attempt 1" in (told := refusal(say("logs", "tiny", "--rank", "4")))
    assert "from 0 to 3" in told
    assert "--attempt is 99: expected an attempt" in (told := refusal(say("logs", "tiny", "--attempt", "99")))
    assert "at most 1, the newest" in told
    for option in ("--tail", "--attempt", "--rank"):
        assert f"{option} is {HUGE}: expected a smaller number" in refusal(say("logs", "tiny", option, HUGE))
    for command in ("stop", "suspend", "resume"):
        told = refusal(say(command, "tiny", "--revision", HUGE))
        assert f"--revision is {HUGE}: expected a smaller number" in told


def test_refusals_of_a_job_that_waits_name_the_option(world: World, client: TrainClient, say: Say) -> None:
    client.submit(tables(world.storage, nproc=4))
    assert f"--rank is {HUGE}: expected a smaller number" in refusal(say("stack", "tiny", "--rank", HUGE))
    assert "whose ranks live" in refusal(say("stack", "tiny"))
    told = refusal(say("logs", "tiny", "--attempt", "3"))
    assert "--attempt is 3: expected an attempt" in told and "nothing has started" in told
