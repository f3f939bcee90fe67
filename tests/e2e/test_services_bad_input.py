"""What a user may get wrong with the services: one line that names what, where and the remedy, exit code 2, and nothing
half made.

The services of these tests were set up by a clock that is an hour ahead, and nobody notices.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.faulty_proxy import Spoiler, proxying
from support.jobs import PHALANX, Command, job_folder, run_cli, wait_until, write_job
from support.services import Services, resized, services

from phalanx.cli.entry import main
from phalanx.core.errors import PhalanxError
from phalanx.home.layout import Home
from phalanx.home.make import HomeSettings, make_home
from phalanx.home.state import read_state
from phalanx.rpc import pki, read_client, write_config
from phalanx.rpc.tokens import Authority, Role, write_token
from phalanx.spec.source import read_toml

pytestmark = pytest.mark.timeout(300)  # `phalanx up` of the module counts to its first test

HOUR = timedelta(hours=1)
Say = Callable[..., tuple[int, str, list[str]]]


class AnHourAhead(datetime):
    """The time as a machine sees it whose clock is wrong."""

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + HOUR  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = Path(tmp_path_factory.mktemp("up")) / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pki, "datetime", AnHourAhead)
        make_home(folder, HomeSettings(port_base=0))
    with services(folder, slots=2) as running:
        yield running


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Say:
    """`phalanx ARGUMENTS...` run in this process: its exit code, what is on stdout, the lines on stderr."""

    def said(*arguments: str | Path) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["phalanx", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "60")
        capfd.readouterr()
        with pytest.raises(SystemExit) as ending:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in err, err
        return int(ending.value.code or 0), out, err.splitlines()

    return said


@pytest.fixture
def operator(say: Say, shared: Services, monkeypatch: pytest.MonkeyPatch) -> Say:
    """The same as an operator of the services that these tests share."""
    monkeypatch.setenv("PHALANX_CONTEXT", str(shared.home.client))
    return say


def one_line(found: tuple[int, str, list[str]], *wanted: str) -> None:
    """A refusal: exit code 2, one line that holds all of `wanted`, nothing else."""
    code, out, lines = found
    assert (code, out, len(lines)) == (2, "", 1), found
    assert lines[0].startswith("phalanx: ") and all(text in lines[0] for text in wanted), (lines, wanted)


@pytest.fixture(scope="module")
def halted(corpus: str, shared: Services, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a job that was stopped before it ever ran."""
    path = resized(write_job(Path(tmp_path_factory.mktemp("halted")), corpus, nproc=4), _SMALL, name="halted")
    with shared.client() as client:
        client.submit(path, request_id="halted-1")
        client.stop("halted")
        client.wait("halted", 20)
    return path


@pytest.fixture(scope="module")
def waiting(corpus: str, shared: Services, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a job that waits for more slots than there are."""
    path = resized(write_job(Path(tmp_path_factory.mktemp("waiting")), corpus, nproc=4), _SMALL, name="waiting")
    with shared.client() as client:
        client.submit(path)
        wait_until(lambda: "waits for 4 slots" in client.job("waiting").message, 20, "no word of slots")
    return path


_SMALL = ("local_batch_size = 4", "local_batch_size = 1")
_NAMED = ("show", "watch", "logs", "wait", "stop", "suspend", "resume", "checkpoint", "stack")


@pytest.mark.parametrize("command", _NAMED)
def test_job_that_does_not_exist_is_told_in_one_line(operator: Say, command: str) -> None:
    one_line(operator("job", command, "nowhere"), "projects/default/jobs/nowhere", "phalanx job ls")


def test_job_name_of_no_form_is_told_in_one_line(operator: Say) -> None:
    one_line(operator("job", "show", "a/b/c/d"), "a/b/c/d", "PROJECT/NAME")


_HUGE = "9" * 23


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (("logs", "halted", "--rank", _HUGE), "--rank is 9"),
        (("logs", "halted", "--rank", "99999999999999"), "--rank is 9"),
        (("logs", "halted", "--tail", _HUGE), "--tail is 9"),
        (("stop", "halted", "--revision", _HUGE), "--revision is 9"),
        (("stack", "halted", "--rank", _HUGE), "--rank is 9"),
    ],
)
def test_number_that_no_message_holds_is_told_in_one_line(
    operator: Say, halted: Path, command: tuple[str, ...], wanted: str
) -> None:
    one_line(operator("job", *command), wanted, "a smaller number")


def test_watch_behind_a_revision_that_is_not_there_yet_is_told_in_one_line(operator: Say, halted: Path) -> None:
    for after in ("99", _HUGE):
        one_line(operator("job", "watch", "halted", "--after", after), "--after", after, "the newest")


@pytest.mark.parametrize(
    "override",
    [f"training.steps={_HUGE}", f"cluster.nproc={_HUGE}", "cluster.nodes=4294967296", f"training.seed={_HUGE}"],
)
def test_huge_number_in_a_job_is_refused_everywhere_and_nothing_is_stored(
    operator: Say, halted: Path, override: str
) -> None:
    before, key = files_of(halted), override.partition("=")[0]
    one_line(operator("job", "submit", halted, "--set", 'job.name="huge"', "--set", override), key, "at most")
    one_line(operator("job", "submit", halted, "--dry-run", "--set", override), key, "at most")
    if key != "training.seed":
        one_line(operator("job", "resume", "halted", "--set", override), key, "at most")
    assert files_of(halted) == before
    assert operator("job", "show", "huge")[0] == 2 and operator("job", "ls", "--json")[0] == 0


def test_long_value_is_told_by_its_beginning(operator: Say) -> None:
    code, _, lines = operator("job", "show", "x" * 5000)
    assert code == 2 and len(lines) == 1 and len(lines[0]) < 1000 and "characters" in lines[0]


def test_client_given_values_of_another_type_tells_which(shared: Services) -> None:
    with shared.client() as client:
        wrong = [
            lambda: client.job(5),
            lambda: client.job(None),
            lambda: client.submit(None),
            lambda: client.fork("halted", at=20),
            lambda: client.logs("halted", "x"),
            lambda: client.register(5, "file:///x"),
            lambda: client.register("x", 5),
            lambda: client.stacks("halted", [2**40]),
            lambda: client.stop("halted", expected_revision=-(10**30)),
        ]
        for call in wrong:
            with pytest.raises(PhalanxError):
                found = call()
                list(found)


@pytest.mark.parametrize(("key", "value"), [("optimizer.lr", "0.5"), ("training.seed", "7"), ("model.args.dim", "32")])
def test_resume_with_an_identity_key_changed_names_the_key_and_the_fork(
    operator: Say, halted: Path, key: str, value: str
) -> None:
    before = files_of(halted)
    one_line(operator("job", "resume", "halted", "--set", f"{key}={value}"), key, value, "fork the job")
    assert files_of(halted) == before


def test_resume_and_fork_name_every_key_that_may_not_change(operator: Say, halted: Path) -> None:
    words = ("--set", "optimizer.lr=0.5", "--set", "training.seed=7")
    code, _, lines = operator("job", "resume", "halted", *words)
    assert code == 2 and [line.split()[1] for line in lines] == ["optimizer.lr", "training.seed"], lines


def test_fork_that_changes_shapes_is_refused_by_the_key(operator: Say, halted: Path) -> None:
    found = operator("job", "submit", "--from", "halted", "--set", "model.args.dim=32")
    one_line(found, "model.args.dim", "shapes tensors", "start a new job")
    assert operator("job", "show", "halted-2")[0] == 2


def test_fork_without_a_checkpoint_is_told_so(operator: Say, halted: Path) -> None:
    one_line(operator("job", "submit", "--from", "halted@7"), "checkpoint", "7", "none")
    one_line(operator("job", "submit", "--from", "halted@seven"), "seven", "a step")
    one_line(operator("job", "submit", "--from", "nowhere"), "projects/default/jobs/nowhere")


def test_request_id_of_another_job_and_a_name_that_exists_are_refused(
    operator: Say, halted: Path, shared: Services
) -> None:
    other = resized(halted, ('name = "halted"', 'name = "other"'), name="")
    one_line(operator("job", "submit", other, "--request-id", "halted-1"), "request_id", "halted-1", "jobs/halted")
    changed = operator("job", "submit", halted, "--request-id", "halted-1", "--set", "training.steps=7")
    one_line(changed, "request_id", "halted-1", "another job file")
    one_line(operator("job", "submit", halted), "job.name", "halted", "resume that job")
    assert operator("job", "show", "other")[0] == 2
    assert not job_folder(other).exists()


def test_wrong_states_are_refused_with_the_state(operator: Say, halted: Path, waiting: Path) -> None:
    one_line(operator("job", "suspend", "halted"), "stopped", "a job that is not over")
    one_line(operator("job", "checkpoint", "halted"), "stopped", "a job that runs")
    one_line(operator("job", "stack", "halted"), "stopped", "whose ranks live")
    one_line(operator("job", "resume", "waiting"), "queued", "suspended, stopped or failed")
    one_line(operator("job", "checkpoint", "waiting"), "queued", "a job that runs")
    one_line(operator("job", "stop", "waiting", "--revision", "77"), "77", "read the job again")
    code, out, lines = operator("job", "stop", "halted", "--json")  # it is stopped already: nothing is to be done
    assert (code, json.loads(out)["state"], lines) == (0, "stopped", [])


def test_wait_succeeds_only_where_the_job_did(operator: Say, halted: Path, waiting: Path) -> None:
    code, _, (line,) = operator("job", "wait", "halted")
    assert code == 1 and "projects/default/jobs/halted stopped" in line
    code, _, (line,) = operator("job", "wait", "waiting", "--timeout", "0.3")
    assert code == 1 and "is queued after 0.3 s" in line


MISTAKES = (
    ("optimizer.lr=-1", "training.seq_len=0", 'checkpoint.when_busy="sometimes"'),
    ("parallel.tp=3", "cluster.nproc=3"),
    ("optimzer.lr=1",),
    ("model.args.n_heads=3",),
)


@pytest.mark.parametrize("mistakes", MISTAKES, ids=lambda mistakes: mistakes[0])
def test_mistake_of_a_job_file_is_told_by_submit_as_by_config_check(
    operator: Say, shared: Services, corpus: str, tmp_path: Path, mistakes: tuple[str, ...]
) -> None:
    path = write_job(tmp_path, corpus)
    words = [word for each in mistakes for word in ("--set", each)]
    checked = operator("config", "check", path, *words)
    assert checked[0] == 2 and checked[2], checked
    assert operator("job", "submit", path, *words) == checked
    assert operator("job", "submit", path, "--dry-run", *words) == checked
    assert sorted(tmp_path.iterdir()) == [path]


def test_service_tells_a_mistake_as_the_command_line_does(
    operator: Say, shared: Services, corpus: str, tmp_path: Path
) -> None:
    path = write_job(tmp_path, corpus)
    path.write_text(path.read_text().replace("lr = 1e-3", "lr = -1").replace("seq_len = 32", "seq_len = 0"))
    lines = operator("config", "check", path)[2]
    with shared.client() as client, pytest.raises(PhalanxError) as refused:
        client.train.submit(read_toml(path))
    assert [f"phalanx: {line}".replace(f"{path}: ", "") for line in str(refused.value).splitlines()] == [
        line.replace(f"{path}: ", "") for line in lines
    ]
    assert sorted(tmp_path.iterdir()) == [path]


def test_submit_of_nothing_and_of_both_is_told(operator: Say, halted: Path) -> None:
    one_line(operator("job", "submit"), "a job file, or --from")
    one_line(operator("job", "submit", halted, "--from", "halted"), "a job file, or --from")
    one_line(operator("job", "submit", halted.with_name("missing.toml")), "missing.toml")
    one_line(operator("job", "ls", "--state", "asleep"), "asleep", "queued")


def test_dataset_that_is_not_there_is_not_registered(operator: Say, tmp_path: Path) -> None:
    one_line(operator("data", "register", "words", (tmp_path / "nowhere").as_uri()), "nowhere", "phalanx data prepare")


def files_of(path: Path) -> list[Path]:
    """Every object of a job file's job."""
    return sorted(job_folder(path).rglob("*"))


# Services that are not up.


def test_services_that_are_not_up_are_told_in_one_line(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PHALANX_CONTEXT", raising=False)
    one_line(say("job", "ls"), "phalanx-home/client.toml", "phalanx up")
    assert say("up", "--init-only", "--port-base", "0", "--json")[0] == 0
    one_line(say("job", "ls"), "train", "127.0.0.1:", "phalanx up")
    one_line(say("down"), "phalanx-home", "services are up")
    assert say("status")[0] == 1


def test_one_service_that_is_not_up_is_named_and_the_others_answer(
    say: Say, shared: Services, corpus: str, tmp_path: Path
) -> None:
    context = tmp_path / "client.toml"
    own = read_client(shared.home.client)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = {"data": f"127.0.0.1:{nobody.getsockname()[1]}"}
        write_config(context, replace(own, services={**own.services, **away}))
        one_line(say("data", "register", "words", corpus, "--context", context), "data", "phalanx up")
        assert say("job", "ls", "--context", context)[0] == 0


# `phalanx up`.


def test_second_up_on_a_home_is_refused_and_the_first_goes_on(say: Say, shared: Services) -> None:
    before = shared.state
    one_line(say("up", "--home", shared.home.folder, "--port-base", "0"), "services are not up", "phalanx down")
    one_line(say("up", "-d", "--home", shared.home.folder, "--port-base", "0"), "services are not up", "phalanx down")
    one_line(say("up", "--init-only", "--home", shared.home.folder, "--port-base", "0"), "services are not up")
    assert shared.state == before


@pytest.mark.parametrize("offset", [0, 2, 12], ids=["page", "train", "metrics of train"])
def test_port_in_use_is_told_in_one_line_and_nothing_stays_up(tmp_path: Path, offset: int) -> None:
    base = free_base()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + offset))
        taken.listen(1)
        home = tmp_path / "home"
        with Command([PHALANX, "up", "--home", home, "--port-base", str(base), "--no-agent"]) as command:
            finished = command.finish()
            command.wait_until_nothing_lives()
    told = [line for line in finished.err.splitlines() if line.startswith("phalanx: ")]
    assert finished.code == 2 and finished.out == "" and len(told) == 1, finished
    assert f"127.0.0.1:{base + offset}" in told[0] and "free" in told[0], told
    assert read_state(Home(home)) is None or not any(each.pid for each in read_state(Home(home)).processes)


def free_base() -> int:
    """A port from which on as many are free as `phalanx up` takes."""
    for base in range(20_000 + os.getpid() % 5_000, 60_000, 20):
        with ExitStack() as stack:
            try:
                for port in range(base, base + 16):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise AssertionError("no ports are free")


BROKEN = ("pki/ca.key", "pki/ca.crt", "pki/train.key", "pki/train.crt", "keys/token.key", "train.toml")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_of_a_home_is_named_with_what_to_do(say: Say, tmp_path: Path, name: str) -> None:
    words = ("up", "--init-only", "--home", tmp_path, "--port-base", "0")
    assert say(*words)[0] == 0
    (tmp_path / name).write_text("}{ garbage\n")
    one_line(say(*words), name)


@pytest.mark.parametrize(
    "name",
    ["pki/train.key", "pki/train.crt", "keys/token.key", "keys/token.pub", "train.toml", "tokens/operator.token"],
)
def test_missing_file_of_a_home_is_made_again(say: Say, tmp_path: Path, name: str) -> None:
    words = ("up", "--init-only", "--home", tmp_path, "--port-base", "0")
    assert say(*words)[0] == 0
    (tmp_path / name).unlink()
    assert say(*words)[0] == 0
    assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "garbage"),
    [
        ("client.toml", True),
        ("pki/operator.key", False),
        ("pki/ca.crt", False),
        ("pki/operator.crt", True),
        ("tokens/operator.token", False),
    ],
)
def test_broken_context_of_a_client_is_named_in_one_line(say: Say, tmp_path: Path, name: str, garbage: bool) -> None:
    assert say("up", "--init-only", "--home", tmp_path, "--port-base", "0")[0] == 0
    (tmp_path / name).write_text("}{ garbage\n") if garbage else (tmp_path / name).unlink()
    one_line(say("job", "ls", "--context", tmp_path / "client.toml"), Path(name).name)


@pytest.mark.timeout(300)
def test_store_without_create_only_put_is_refused_by_up_and_told_by_submit(
    s3_prefix: str, ministack: str, tmp_path: Path
) -> None:
    with proxying(ministack) as proxy:
        proxy.choose = lambda method, path, number: Spoiler(drop_header="if-none-match")
        words = [
            "up",
            "--home",
            tmp_path / "home",
            "--port-base",
            "0",
            "--no-agent",
            "--storage",
            f"{s3_prefix}/cluster",
        ]
        with Command([PHALANX, *words, "--storage-endpoint", proxy.endpoint]) as command:
            finished = command.finish()
            command.wait_until_nothing_lives()
    told = [line for line in finished.err.splitlines() if line.startswith("phalanx: ")]
    assert finished.code == 2 and len(told) == 1, finished
    assert "create-only put" in told[0] and s3_prefix in told[0], told


# Clocks that differ.


def test_clocks_an_hour_apart_change_nothing(operator: Say, shared: Services, halted: Path, tmp_path: Path) -> None:
    cert = pki.read_certificate(shared.home.pki / "train.crt")
    assert cert.not_valid_before_utc > datetime.now(UTC) - pki.BACKDATED + HOUR / 2
    authority = Authority.load(shared.home.authority)
    for name, lasts_s in (("slow", -1800.0), ("fast", 1800.0)):
        path = tmp_path / f"{name}.token"
        write_token(path, authority.mint(name, Role.OPERATOR, lasts_s=lasts_s))
        context = tmp_path / f"{name}.toml"
        own = read_client(shared.home.client)
        write_config(context, replace(own, security=replace(own.security, token=path)))
        assert operator("job", "show", "halted", "--context", context)[0] == 0


def test_supervisor_told_to_end_leaves_nothing_and_its_home_starts_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    words = ["up", "--home", home, "--port-base", "0", "--no-agent"]
    with Command([PHALANX, *words]) as command:
        command.wait_for("starting")
        command.signal(signal.SIGKILL)
        command.finish()
        command.wait_until_nothing_lives(20)
    assert run_cli(["status", "--home", home, "--json"]).code == 1
    with Command([PHALANX, *words]) as command:
        command.wait_for("everything is up")
        command.signal(signal.SIGINT)
        assert command.finish().code == 0
        command.wait_until_nothing_lives()
