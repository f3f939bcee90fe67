"""gRPC on a Unix socket, for processes of one user on one machine: an agent and its ranks.

No TLS: the socket (0600) lies in a folder (0700) that only its owner enters. A token may be asked for as well.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

import grpc
from opentelemetry import trace

from phalanx.core.errors import PhalanxError
from phalanx.rpc.client import Channel
from phalanx.rpc.credentials import TokenFile
from phalanx.rpc.handlers import Access, Gate, Interceptor
from phalanx.rpc.limits import (
    CALL_DEADLINE_S,
    MAX_MESSAGE_BYTES,
    STREAM_DEADLINE_S,
    Limits,
    channel_options,
)
from phalanx.rpc.line import Line, Policy
from phalanx.rpc.metrics import Metrics
from phalanx.rpc.server import STANDARD_ACCESS, Adder, Server, start_server
from phalanx.rpc.tokens import Caller, Role, Verifier

MAX_PATH_BYTES = 107
LOCAL = Caller("local", Role.AGENT)


def check_socket_path(path: Path) -> Path:
    """The path itself, absolute; raises PhalanxError when it is longer than a Unix socket's address may be."""
    absolute = path.absolute()
    num_bytes = len(str(absolute).encode())
    if num_bytes > MAX_PATH_BYTES:
        raise PhalanxError(
            f"path of the socket {absolute}",
            value=f"{num_bytes} bytes",
            expected=f"at most {MAX_PATH_BYTES} bytes, the limit of Unix sockets",
            remedy="choose a folder with a shorter path",
        )
    return absolute


def serve_unix(
    path: Path,
    adders: Sequence[Adder],
    access: Access,
    *,
    name: str = "agent",
    verifier: Verifier | None = None,
    limits: Limits | None = None,
    metrics: Metrics | None = None,
    tracer: trace.Tracer | None = None,
) -> Server:
    """Starts to serve on the socket; its folder is made and closed to others.

    verifier: checks the token that every call must then bring; without one every caller is `LOCAL`, an agent.
    Raises PhalanxError when the path is too long, the folder is another user's, or a living server has the socket;
    the socket of a dead one is replaced.
    """
    socket_path, limits = check_socket_path(path), limits or Limits()
    _private_folder(socket_path.parent)
    _refuse_living(socket_path)
    metrics = metrics or Metrics()
    interceptor = Interceptor(
        Gate(verifier, LOCAL if verifier is None else None),
        {**STANDARD_ACCESS, **access},
        limits,
        metrics.calls,
        tracer,
    )
    return start_server(
        name,
        adders,
        tuple(dict.fromkeys(method.split("/")[1] for method in access)),
        interceptor,
        limits,
        lambda server: _bound(server, socket_path),
        lambda is_healthy: None,
    )


def connect_unix(
    path: Path,
    *,
    service: str = "agent",
    token: Path | None = None,
    idempotent: Collection[str] = (),
    deadline_s: float = CALL_DEADLINE_S,
    stream_deadline_s: float = STREAM_DEADLINE_S,
    patience_s: float | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    tracer: trace.Tracer | None = None,
) -> Channel:
    """A channel to the server on the socket, with the promises of `connect`."""
    address = f"unix:{check_socket_path(path)}"
    policy = Policy(deadline_s, stream_deadline_s, max_message_bytes, patience_s, frozenset(idempotent))
    channel = grpc.insecure_channel(address, channel_options(max_message_bytes))
    return Channel(channel, Line(service, address, policy, None, TokenFile(token) if token else None, tracer))


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise PhalanxError(
            f"folder of the socket {folder}",
            expected=f"a folder of one's own ({error.strerror})",
            remedy="choose another folder",
        ) from error


def _refuse_living(path: Path) -> None:
    """Removes what a dead server left; raises PhalanxError for a living one and for a file that is no socket."""
    if path.exists() and not path.is_socket():
        raise PhalanxError(f"socket {path}", expected="a free name, not a file", remedy="remove it or choose another")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                path.unlink(missing_ok=True)
                return
    raise PhalanxError(
        f"socket {path}", expected="one that no process serves", remedy="end the process that does, or choose another"
    )


def _bound(server: grpc.Server, path: Path) -> str:
    server.add_insecure_port(f"unix:{path}")
    path.chmod(0o600)
    return f"unix:{path}"
