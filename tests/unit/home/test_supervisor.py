"""The supervisor against real processes: started, started again, ended, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from phalanx.agent.ending import Killed
from phalanx.core.errors import PhalanxError
from phalanx.gang import StopSignals
from phalanx.home.addresses import Addresses, free, refuse_taken_ports
from phalanx.home.layout import Home
from phalanx.home.state import HomeState, held, is_held, read_last_end, read_state
from phalanx.home.supervisor import Supervisor

DEADLINE_S = 20.0
HEALTHY = """
    import http.server, os, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("X-Phalanx-Process", str(os.getpid()))
            self.end_headers()
        def log_message(self, *arguments):
            pass
    host, port = sys.argv[1].split(":")
    http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""


def healthy(addresses: Addresses, name: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(HEALTHY), addresses.metrics[name]]


def until(condition, what: str):
    end_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)
    return found


class Running:
    """A supervisor in a thread."""

    def __init__(self, home: Home, commands) -> None:
        self.home, self.stop, self.states, self.error = home, StopSignals(), list[HomeState](), None
        self._supervisor = Supervisor(home, commands[0], commands[1], 5.0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with held(self.home):
                self._supervisor.run(self.stop, self.states.append)
        except PhalanxError as error:
            self.error = error

    @property
    def lost(self) -> tuple[str, ...]:
        return self._supervisor.lost

    def wait_state(self, condition, what: str) -> HomeState:
        return until(lambda: next((each for each in self.states[::-1][:1] if condition(each)), None), what)

    def end(self) -> None:
        self.stop.request()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


@pytest.fixture
def start(home):
    running = []

    def start(commands, addresses):
        running.append(Running(home, (addresses, commands)))
        return running[-1]

    yield start
    for each in running:
        each.end()


def test_supervisor_killed_process_is_started_again_and_counted(home, start):
    addresses = free("127.0.0.1")
    running = start({"data": healthy(addresses, "data"), "train": healthy(addresses, "train")}, addresses)
    first = running.wait_state(lambda state: state.ready, "up")

    os.kill(first.process("data").pid, signal.SIGKILL)

    again = running.wait_state(lambda state: state.ready and state.process("data").restarts == 1, "up again")
    assert again.process("data").last_exit == "SIGKILL"
    assert again.process("data").pid != first.process("data").pid
    assert again.process("train") == first.process("train")
    assert read_state(home) == again


def test_supervisor_stopped_leaves_no_process_and_no_lock(home, start):
    addresses = free("127.0.0.1")
    running = start({"data": healthy(addresses, "data"), "agent": healthy(addresses, "agent")}, addresses)
    state = running.wait_state(lambda state: state.ready, "up")

    running.end()

    assert not any(psutil.pid_exists(each.pid) for each in state.processes)
    assert not is_held(home)
    assert read_state(home) is None


def test_supervisor_tells_each_process_once_to_end(home, start):
    """A second SIGTERM would kill one that is past its handlers."""
    addresses = free("127.0.0.1")
    ends_s = {"data": 0.2, "train": 0.6, "checkpoint": 1.0}
    running = start({name: slow_to_end(addresses, name, end_s) for name, end_s in ends_s.items()}, addresses)
    running.wait_state(lambda state: state.ready, "up")

    running.end()

    assert {each.last_exit for each in running.states[-1].processes} == {"exit code 0"}


def slow_to_end(addresses: Addresses, name: str, end_s: float) -> list[str]:
    """Healthy, and for so long with the signal's default after the first SIGTERM, as an interpreter that winds up."""
    end = f"""
    import signal, time
    def end(*_):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep({end_s})
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    """
    serve = textwrap.dedent(HEALTHY)
    code = serve.replace("class Handler", textwrap.dedent(end) + "class Handler")
    return [sys.executable, "-c", code, addresses.metrics[name]]


def test_child_told_to_end_before_its_module_has_handlers_ends_in_order(tmp_path):
    (tmp_path / "slow.py").write_text(
        f"import pathlib, signal\npathlib.Path({str(tmp_path / 'up')!r}).write_text('up')\nsignal.pause()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "phalanx.home.child", str(os.getpid()), "slow"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    try:
        until((tmp_path / "up").exists, "the module runs")
        child.terminate()
        assert child.wait(DEADLINE_S) == 0
    finally:
        child.kill()


def test_supervisor_user_error_ends_everything_with_the_words_of_the_process(home, start):
    addresses = free("127.0.0.1")
    say = "import sys; sys.stderr.write('phalanx: listen = 1: expected a free port\\n'); sys.exit(2)"
    running = start({"data": healthy(addresses, "data"), "train": [sys.executable, "-c", say]}, addresses)

    until(lambda: running.error, "the error")

    assert "listen = 1: expected a free port" in str(running.error)
    until(lambda: not is_held(home), "the end")


def test_supervisor_process_that_keeps_dying_is_started_ever_more_slowly(home, start):
    addresses = free("127.0.0.1")
    running = start({"data": [sys.executable, "-c", "raise SystemExit(3)"]}, addresses)

    state = running.wait_state(lambda state: state.process("data").restarts >= 3, "three restarts")

    assert state.process("data").last_exit == "exit code 3"
    assert not state.ready


def test_home_held_twice_is_refused(home):
    with held(home), pytest.raises(PhalanxError, match="--home"), held(home):
        pass


def test_child_of_a_killed_supervisor_gets_sigterm(tmp_path):
    said = tmp_path / "said"
    module = tmp_path / "told.py"
    module.write_text(
        textwrap.dedent(f"""
        import pathlib, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(said)!r}).write_text("told"), sys.exit(0)))
        pathlib.Path({str(tmp_path / "up")!r}).write_text("up")
        while True:
            signal.pause()
        """)
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys; subprocess.Popen([sys.executable, '-m', 'phalanx.home.child', "
            "str(os.getpid()), 'told']).wait()",
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    until((tmp_path / "up").exists, "the child is up")

    parent.kill()
    parent.wait()

    until(said.exists, "the child was told")
    assert Path(said).read_text() in ("", "told")


def test_supervisor_takes_no_other_process_on_its_port_for_its_own(home, start):
    addresses = free("127.0.0.1")
    with subprocess.Popen(healthy(addresses, "data")) as other:
        try:
            until(lambda: is_answered(addresses.metrics["data"]), "the other process answers")
            wait = [sys.executable, "-c", "import signal; signal.pause()"]
            running = start({"data": wait, "train": healthy(addresses, "train")}, addresses)
            state = running.wait_state(lambda state: state.process("train").ready, "train is up")
            assert not state.process("data").ready
        finally:
            other.kill()


def is_answered(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def test_supervisor_quotes_no_words_of_an_earlier_process(home, start):
    home.log("train").parent.mkdir(parents=True)
    home.log("train").write_text("phalanx: words of an old process\n")
    addresses = free("127.0.0.1")
    running = start({"train": [sys.executable, "-c", "raise SystemExit(2)"]}, addresses)

    until(lambda: running.error, "the error")

    assert "see its log" in str(running.error)


def test_supervisor_tells_what_the_agent_did_not_commit(home, start):
    addresses = free("127.0.0.1")
    say = """
        import signal, sys
        from phalanx.agent.ending import Killed, write_end
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("up", flush=True)
        signal.pause()
    """
    said = textwrap.dedent(say).replace(
        "sys.exit(0)",
        f"sys.exit(write_end(__import__('pathlib').Path({str(home.agent_state)!r}), [Killed('tiny', 3, 9, 5)]))",
    )
    running = start({"agent": [sys.executable, "-c", said]}, addresses)
    pid = running.wait_state(lambda state: state.process("agent").pid, "it lives").process("agent").pid
    until(lambda: "up" in home.log("agent").read_text(), "the agent is up")

    running.end()

    assert pid and running.lost == (str(Killed("tiny", 3, 9, 5)),) == read_last_end(home, os.getpid())


def test_ports_that_are_taken_are_refused_by_the_name_of_the_process():
    addresses = free("127.0.0.1")
    host, port = addresses.metrics["train"].split(":")
    refuse_taken_ports(addresses, ("data", "train", "agent"))
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen(1)
        with pytest.raises(PhalanxError, match=f"metrics of train is '127.0.0.1:{port}': expected a free port"):
            refuse_taken_ports(addresses, ("data", "train", "agent"))
        refuse_taken_ports(addresses, ("data", "agent"))
