"""A service to test with, compiled when the tests start: it says, counts, collects and chats as a test tells it."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from grpc_tools import protoc

from phalanx.rpc import OPERATORS, VIEWERS, Channel, Role, Server, connect, serve
from phalanx.rpc.testing import Cluster

SERVICE = "phalanx.test.v1.EchoService"


def _compiled() -> tuple[Any, Any]:
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="phalanx-echo-") as folder:
        outputs = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
        assert protoc.main(["protoc", f"-I{here}", *outputs, "echo.proto"]) == 0
        sys.path.insert(0, folder)
        try:
            return importlib.import_module("echo_pb2"), importlib.import_module("echo_pb2_grpc")
        finally:
            sys.path.remove(folder)


pb, stubs = _compiled()
DESCRIPTOR = pb.DESCRIPTOR.services_by_name["EchoService"]


def method(name: str) -> str:
    return f"/{SERVICE}/{name}"


ACCESS = {method(name): VIEWERS for name in ("Say", "Count", "Collect", "Chat")} | {method("Do"): OPERATORS}


class Echo(stubs.EchoServiceServicer):
    """Answers with what it was given; a test replaces single methods."""

    def __init__(self, **methods: Callable[[Any, grpc.ServicerContext], Any]) -> None:
        for name, behaviour in methods.items():
            setattr(self, name, behaviour)

    def Say(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return request

    Do = Say

    def Count(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        for at in range(request.at + 1, 11):
            yield pb.Cursor(at=at)

    def Collect(self, request: Iterator[Any], context: grpc.ServicerContext) -> Any:  # noqa: N802
        return pb.Words(text=" ".join(each.text for each in request))

    def Chat(self, request: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        yield from request


def serve_echo(cluster: Cluster, echo: Echo | None = None, listen: str = "127.0.0.1:0", **settings: Any) -> Server:
    config = replace(cluster.service("echo"), listen=listen, **settings.pop("config", {}))
    add = stubs.add_EchoServiceServicer_to_server
    return serve(config, [lambda server: add(echo or Echo(), server)], settings.pop("access", ACCESS), **settings)


def call_echo(cluster: Cluster, server: Server, role: Role = Role.OPERATOR, **settings: Any) -> Channel:
    return connect("echo", server.address, cluster.credentials(role), **settings)


def stub(channel: grpc.Channel) -> Any:
    return stubs.EchoServiceStub(channel)
