"""`phalanx up`, `status` and `down` told what cannot work: one line, exit code 2, and nothing made."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from phalanx.cli.entry import main
from phalanx.core.errors import OutsideError
from phalanx.home import make
from phalanx.home.detached import wait_ready
from phalanx.home.layout import Home
from phalanx.home.make import HomeSettings, make_home
from phalanx.home.state import HomeState, ProcessState, held, write_state
from phalanx.rpc.tokens import Role, Verifier

INIT = ("up", "--init-only", "--port-base", "0")


@pytest.fixture
def say(monkeypatch, capfd, tmp_path):
    """`phalanx ARGUMENTS...` in this process and in a folder of its own: exit code, stdout, lines of stderr."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def said(*arguments: str | Path) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["phalanx", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ending:
            main()
        out, err = capfd.readouterr()
        return int(ending.value.code or 0), out, err.splitlines()

    return said


def one_line(found, *wanted: str) -> None:
    code, out, lines = found
    assert (code, out, len(lines)) == (2, "", 1), found
    assert lines[0].startswith("phalanx: ") and all(text in lines[0] for text in wanted), (lines, wanted)


def refused_homes(folder: Path) -> dict[str, str]:
    (folder / "file").write_text("")
    (folder / "loop").symlink_to("loop")
    return {
        "file": "file",
        "below a file": "file/home",
        "too long": "x" * 300,
        "no UTF-8": os.fsdecode(b"h\xff\xfe"),
        "empty": "",
        "loop": "loop",
    }


@pytest.mark.parametrize("kind", ["file", "below a file", "too long", "no UTF-8", "empty", "loop"])
@pytest.mark.parametrize("command", [INIT, ("up", "--port-base", "0"), ("up", "-d"), ("status",), ("down",)])
def test_home_that_can_be_no_folder_is_told_in_one_line(say, tmp_path, kind, command):
    here = tmp_path / "here"
    name = refused_homes(here)[kind]
    before = sorted(here.rglob("*"))

    one_line(say(*command, "--home", name), "--home", "expected")

    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("command", [INIT, ("up", "-d")])
def test_home_where_nothing_can_be_made_is_told_in_one_line(say, command):
    one_line(say(*command, "--home", "/proc/phalanx"), "--home", "/proc/phalanx")


def test_status_asks_for_no_right_to_write(say, tmp_path, monkeypatch):
    home = Home(tmp_path / "home")
    assert say(*INIT, "--home", home.folder)[0] == 0
    real = os.open

    def read_only(path, flags, *rest, **more):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        status, init = say("status", "--home", home.folder), say(*INIT, "--home", home.folder)
    assert status[0] == 1 and len(status[2]) == 1 and "nothing is up" in status[2][0]
    one_line(init, "Read-only file system")


def test_full_disk_is_nobodys_mistake(say, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "home" / "pki"))

    monkeypatch.setattr(make, "write_config", full)
    code, out, lines = say(*INIT, "--home", tmp_path / "home")
    assert (code, out, len(lines)) == (1, "", 1) and "No space left" in lines[0], lines


def test_state_that_no_supervisor_wrote_is_named(say, tmp_path):
    home = Home(tmp_path / "home")
    with held(home):
        home.state.write_bytes(b"\xff{")
        one_line(say("status", "--home", home.folder), "state.json")


def test_token_that_is_none_is_made_again_and_a_folder_in_its_place_is_named(say, tmp_path):
    home, _ = make_home(tmp_path / "home", HomeSettings(port_base=0))
    home.token(Role.OPERATOR).write_bytes(b"\xff")
    assert say(*INIT, "--home", home.folder)[0] == 0
    Verifier.load(home.token_key).verify(home.token(Role.OPERATOR).read_text().strip())

    home.token(Role.VIEWER).unlink()
    home.token(Role.VIEWER).mkdir()
    one_line(say(*INIT, "--home", home.folder), "viewer.token", "directory")


@pytest.mark.parametrize("name", ["keys/token.pub", "pki/ca.crt", "data.toml", "client.toml", "up.lock", "state.json"])
def test_folder_in_the_place_of_a_file_is_named(say, tmp_path, name):
    home, _ = make_home(tmp_path / "home", HomeSettings(port_base=0))
    (home.folder / name).unlink(missing_ok=True)
    (home.folder / name / "inside").mkdir(parents=True)
    one_line(say(*INIT, "--home", home.folder), Path(name).name)


REFUSED = [
    ("--name", "é"),
    ("--name", ""),
    ("--name", "a b"),
    ("--name", "a/b"),
    ("--name", "x" * 64),
    ("--host", ""),
    ("--host", "0.0.0.0"),
    ("--host", "0"),
    ("--host", "::"),
    ("--host", "224.0.0.1"),
    ("--host", "255.255.255.255"),
    ("--host", "a b"),
    ("--host", "::1"),
    ("--host", "192.0.2.1"),
    ("--host", "no-such-host.invalid"),
    ("--dcgm", "foo"),
    ("--dcgm", "foo:1,"),
    ("--dcgm", "foo:0"),
    ("--storage-endpoint", "nonsense"),
    ("--storage-endpoint", "http://"),
    ("--storage-endpoint", "http://host:99999"),
    ("--storage-region", "a b"),
    ("--storage", "file:///proc/x"),
    ("--storage", "s3://"),
    ("--storage", os.fsdecode(b"file:///h\xff")),
    ("--slots", "999999999999999999999"),
    ("--slots", "0"),
    ("--port-base", "65530"),
    ("--agent-grace", "nan"),
    ("--agent-grace", "inf"),
    ("--wait", "nan"),
    ("--page-password", "missing"),
]


@pytest.mark.parametrize(("option", "value"), REFUSED)
@pytest.mark.parametrize("mode", ["--init-only", "-d"])
def test_option_that_cannot_work_is_refused_before_anything_is_made(say, tmp_path, option, value, mode):
    found = say("up", mode, "--home", tmp_path / "home", option, value)

    code, out, lines = found
    assert (code, out) == (2, "") and "Traceback" not in "\n".join(lines), found
    assert option in lines[0] or "storage URL" in lines[0], found
    assert len(lines) == 1, found
    assert not (tmp_path / "home").exists()


def test_names_and_addresses_that_work_are_taken(say, tmp_path):
    words = ("--name", "node-1.example.org", "--name", "10.0.0.7", "--name", "fd00::2", "--host", "localhost")
    assert say(*INIT, "--home", tmp_path / "home", *words, "--dcgm", "node-1:9400, node-2:9400")[0] == 0


def test_detach_beside_init_only_is_refused(say, tmp_path):
    one_line(say(*INIT, "-d", "--home", tmp_path / "home"), "--detach", "--init-only")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("data", [b"garbage", b"\xff\x00\xfe", b"", b"a.b.c"])
def test_token_that_is_none_is_told_by_who_is_asked_for(say, tmp_path, data):
    home, _ = make_home(tmp_path / "home", HomeSettings(port_base=0))
    home.token(Role.OPERATOR).write_bytes(data)
    one_line(say("job", "ls", "--mine", "--context", home.client), "operator.token", "token")


def test_key_of_another_certificate_is_named(say, tmp_path):
    home, _ = make_home(tmp_path / "home", HomeSettings(port_base=0))
    (home.pki / "operator.key").write_bytes((home.pki / "viewer.key").read_bytes())
    one_line(say("job", "ls", "--context", home.client), "operator.key", "operator.crt")


@pytest.mark.parametrize(("given", "seen"), [(None, "NONE"), ("DEBUG", "DEBUG")])
def test_grpc_is_silent_in_commands_unless_the_user_wants_it(say, tmp_path, monkeypatch, given, seen):
    monkeypatch.setenv("GRPC_VERBOSITY", given or "x")
    if given is None:
        monkeypatch.delenv("GRPC_VERBOSITY")
    say("job", "ls", "--context", tmp_path / "none.toml")
    assert os.environ["GRPC_VERBOSITY"] == seen


def test_grpc_keeps_its_words_in_services(say, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPC_VERBOSITY", "x")
    monkeypatch.delenv("GRPC_VERBOSITY")
    say(*INIT, "--home", tmp_path / "home")
    assert "GRPC_VERBOSITY" not in os.environ


def test_services_that_are_not_up_in_time_say_where_to_look_and_how_to_wait_longer(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with pytest.raises(OutsideError, match=r"not up within 0 s; see .*up.*; give more seconds as --wait"):
        wait_ready(home, None, 0.0, lambda _: None, "give more seconds as --wait")


def test_services_that_are_not_up_in_time_are_named_with_how_they_ended(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    processes = (
        ProcessState("data", 7, ready=True, restarts=1, last_exit="SIGKILL"),
        ProcessState("train", 0, ready=False, restarts=6, last_exit="exit code 1"),
        ProcessState("agent", 8, ready=False, restarts=0),
    )
    with held(home):
        write_state(home, HomeState(os.getpid(), "", processes))
        with pytest.raises(OutsideError) as raised:
            wait_ready(home, None, 0.3, lambda _: None)
    (line,) = str(raised.value).splitlines()
    assert "(train ended 6 times, last with exit code 1: see" in line and "train.log; agent is still starting)" in line
    assert "data" not in line


@pytest.mark.parametrize("host", ["0.0.0.0", "0"])
def test_host_that_means_all_addresses_is_refused_with_the_reason(say, tmp_path, host):
    one_line(say(*INIT, "--home", tmp_path / "home", "--host", host), f"--host is '{host}'", "all of them")
    assert not (tmp_path / "home").exists()
