"""Who lives in a home, by the kernel's locks; and how what a killed supervisor left comes to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from phalanx.agent.ending import Killed, read_end, write_end
from phalanx.core.errors import OutsideError
from phalanx.home import left, places
from phalanx.home.layout import Home
from phalanx.home.left import end_left
from phalanx.home.places import holder, living, take

DEADLINE_S = 20.0
MODULE = """
    import os, pathlib, signal, sys, time
    said = pathlib.Path(sys.argv[1])
    def on_signal(*_):
        said.write_text(str(time.monotonic_ns()))
        if sys.argv[2] != "deaf":
            sys.exit(0)
    signal.signal(signal.SIGTERM, on_signal if sys.argv[2] != "slow" else lambda *_: None)
    said.with_suffix(".up").touch()
    while not said.with_suffix(".go").exists():
        time.sleep(0.02)
    on_signal()
"""
PARENT = """
    import os, subprocess, sys
    for line in sys.argv[1:]:
        words = line.split(" ")
        place = words.index("PARENT")
        words[place] = str(os.getpid())
        subprocess.Popen([sys.executable, "-m", "phalanx.home.child", *words])
    while True:
        os.read(0, 1) or os._exit(1)
"""


def until(condition, what: str):
    end_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)
    return found


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


@pytest.fixture
def start(tmp_path, home):
    """A parent with children of a home: `start(agent="slow", data="")`; the parent. Each is up when it returns."""
    (tmp_path / "told.py").write_text(textwrap.dedent(MODULE))
    parents = []

    def start(grace_s: float = 0.5, **children: str) -> subprocess.Popen[bytes]:
        lines = []
        for name, how in children.items():
            order = f"--grace {grace_s}" if name == "agent" else f"--after {home.place('agent')}"
            lines.append(f"--place {home.place(name)} {order} PARENT told {tmp_path / name} {how or 'willing'}")
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", textwrap.dedent(PARENT), *lines]
        parents.append(subprocess.Popen(command, env=environ, stdin=subprocess.PIPE))
        for name in children:
            until((tmp_path / f"{name}.up").exists, f"{name} is up")
        return parents[-1]

    yield start
    for parent in parents:
        parent.kill()
        parent.wait()
        parent.stdin.close()
    for each in living(home):
        os.kill(each.pid, signal.SIGKILL)


def test_place_taken_by_a_process_names_it_until_that_dies(home, start):
    parent = start(grace_s=7.0, agent="", data="")

    agent, data = living(home)

    assert (agent.name, agent.grace_s, data.name) == ("agent", 7.0, "data")
    assert psutil.Process(agent.pid).ppid() == parent.pid
    os.kill(agent.pid, signal.SIGKILL)
    until(lambda: living(home) == (data,), "the agent's place is free")


def test_place_of_an_earlier_holder_is_not_taken_for_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "_READ_DEADLINE_S", 0.1)
    path = tmp_path / "data"
    take(path, 0.0)
    path.write_text('{"pid": 1, "started": "of another boot", "grace_s": 0}')

    with pytest.raises(OutsideError, match="does not say who it is"):
        holder(path)


def test_place_of_a_living_process_is_refused_to_a_second(home, start, monkeypatch):
    monkeypatch.setattr(places, "_TAKE_DEADLINE_S", 0.1)
    start(data="")

    with pytest.raises(OutsideError, match="still lives"):
        take(home.place("data"), 0.0)


def test_service_of_a_killed_supervisor_ends_once_the_agent_has_ended(home, start, tmp_path):
    start(grace_s=60.0, agent="slow", data="").kill()

    assert not until((tmp_path / "agent.up").exists, "up") or not (tmp_path / "data").exists()
    (tmp_path / "agent.go").touch()
    until(lambda: not living(home), "both have ended")

    told = [int((tmp_path / name).read_text()) for name in ("agent", "data")]
    assert told == sorted(told)


def test_service_of_a_killed_supervisor_without_an_agent_ends_at_once(home, start, tmp_path):
    start(data="").kill()

    until((tmp_path / "data").exists, "it was told")
    until(lambda: not living(home), "it has ended")


def test_left_processes_that_end_by_themselves_are_only_waited_for(home, start):
    parent = start(agent="", data="")
    before = living(home)
    write_end(home.agent_state, [Killed("projects/default/jobs/x", 2, 9, 5)])
    parent.kill()
    told = []

    lost = end_left(home, told.append)

    assert living(home) == ()
    if told:  # they may have ended before anybody looked
        assert str(home.folder) in told[0] and not any("SIG" in line for line in told)
        assert all("without a word" in line for line in lost) and before


def test_left_agent_that_does_not_end_is_hurried_then_killed(home, start, monkeypatch, tmp_path):
    for name in ("AGENT_END_S", "_HURRIED_S"):
        monkeypatch.setattr(left, name, 0.3)
    parent = start(grace_s=0.1, agent="deaf")
    parent.kill()
    told = []

    lost = end_left(home, told.append)

    assert living(home) == () and (tmp_path / "agent").exists()
    assert [line.rpartition(": ")[2] for line in told if "does not end" in line] == ["SIGTERM", "SIGKILL"]
    assert len(lost) == 1 and "ended without a word" in lost[0] and lost[0] in told


def test_left_processes_are_not_waited_for_after_a_stop(home, start):
    parent = start(grace_s=600.0, agent="deaf")
    parent.kill()

    assert end_left(home, lambda _: None, lambda: True) == []
    assert living(home)


def test_end_that_an_agent_tells_is_read_only_as_its_own(tmp_path):
    killed = Killed("projects/default/jobs/x", 2, 9, 5)
    write_end(tmp_path, [killed])

    assert read_end(tmp_path, os.getpid()) == (killed,)
    assert read_end(tmp_path, os.getpid() + 1) is None
    assert "step 9" in str(killed) and "checkpoint of step 5" in str(killed)
    Path(tmp_path / "last-end.json").write_bytes(b"\xff")
    assert read_end(tmp_path, os.getpid()) is None
