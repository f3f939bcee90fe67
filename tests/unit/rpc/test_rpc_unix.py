from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import rpc_kit as kit

from phalanx.core.errors import PhalanxError
from phalanx.rpc import AGENTS, Caller, NotFound, NotUp, Role, Server, Unauthenticated, caller, connect_unix, serve_unix
from phalanx.rpc.testing import Cluster

ACCESS = dict.fromkeys(kit.ACCESS, AGENTS)


def _serve(path: Path, echo: kit.Echo | None = None, **settings: Any) -> Server:
    add = kit.stubs.add_EchoServiceServicer_to_server
    return serve_unix(path, [lambda server: add(echo or kit.Echo(), server)], ACCESS, **settings)


def test_socket_is_for_its_owner_alone_and_serves_like_any_server(tmp_path: Path) -> None:
    def do(request: Any, context: grpc.ServicerContext) -> Any:
        assert caller(context) == Caller("local", Role.AGENT)
        raise NotFound("x", expected="y", remedy="z")

    path = tmp_path / "run" / "agent.sock"
    with _serve(path, kit.Echo(Do=do)) as server, connect_unix(path) as channel:
        assert server.address == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        channel.wait_ready(10)
        assert [each.at for each in kit.stub(channel).Count(kit.pb.Cursor(at=8))] == [9, 10]
        with pytest.raises(NotFound):
            kit.stub(channel).Do(kit.pb.Words())


def test_socket_that_asks_for_a_token_refuses_a_call_without(tmp_path: Path, cluster: Cluster) -> None:
    path, token = tmp_path / "agent.sock", cluster.credentials(Role.AGENT, "p", "run", 1).token
    with _serve(path, verifier=cluster.tokens.verifier()):
        with connect_unix(path) as channel, pytest.raises(Unauthenticated):
            kit.stub(channel).Do(kit.pb.Words())
        with connect_unix(path, token=token) as channel:
            kit.stub(channel).Do(kit.pb.Words())


def test_socket_path_beyond_107_bytes_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100) / "agent.sock"
    for use in (connect_unix, _serve):
        with pytest.raises(PhalanxError, match=r"bytes': expected at most 107 bytes, the limit of Unix sockets"):
            use(path)
    assert not path.parent.exists()


def test_socket_of_a_living_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with _serve(path):
        with pytest.raises(PhalanxError, match="expected one that no process serves"):
            _serve(path)
        with connect_unix(path) as channel:
            kit.stub(channel).Do(kit.pb.Words())


def test_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    program = "import socket, sys, time; s = socket.socket(1); s.bind(sys.argv[1]); s.listen(); print(1, flush=True)"
    command = [sys.executable, "-c", f"{program}; time.sleep(60)", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    assert path.is_socket()
    with _serve(path), connect_unix(path) as channel:
        kit.stub(channel).Do(kit.pb.Words())


def test_socket_that_nobody_serves_is_not_up(tmp_path: Path) -> None:
    with connect_unix(tmp_path / "none.sock") as channel, pytest.raises(NotUp, match="service agent at unix:"):
        kit.stub(channel).Do(kit.pb.Words())


def test_file_in_the_sockets_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    path.write_text("precious")
    with pytest.raises(PhalanxError, match="expected a free name"):
        _serve(path)
    assert path.read_text() == "precious"
