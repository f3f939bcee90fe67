"""Calls a service: mTLS, the token of a file, a deadline on every call, retries where they are safe, errors of our own.

A channel goes to the generated stubs like gRPC's own. A call raises PhalanxError for what the caller did wrong and
`Unavailable` (`NotUp`, `TimedOut`; OutsideErrors) for what is broken; never `grpc.RpcError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from opentelemetry import trace

from phalanx.rpc.calls import StreamStream, StreamUnary, UnaryStream, UnaryUnary
from phalanx.rpc.config import ClientConfig, Credentials, ServiceConfig, split_address
from phalanx.rpc.credentials import TokenFile, channel_credentials
from phalanx.rpc.errors import NotUp, TimedOut, Unavailable
from phalanx.rpc.limits import CALL_DEADLINE_S, MAX_MESSAGE_BYTES, STREAM_DEADLINE_S, channel_options
from phalanx.rpc.line import Line, Policy
from phalanx.rpc.retry import pause_s

Request = TypeVar("Request")
Response = TypeVar("Response")
_HEALTH_TRY_S, _LONGEST_PAUSE_S = 2.0, 0.5


class Channel(grpc.Channel):
    """A channel to one service; made by `connect` and `connect_unix`, closed by `close` or a `with` block."""

    def __init__(self, channel: grpc.Channel, line: Line) -> None:
        self._channel, self._line = channel, line

    def __repr__(self) -> str:
        return f"Channel({self._line.service!r}, {self._line.endpoint!r})"

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls and the connection."""
        self._channel.close()

    def wait_ready(self, deadline_s: float) -> None:
        """Returns when the service is up and says that it serves.

        Raises NotUp or TimedOut when it does not within the deadline, PhalanxError at once when it refuses this client.
        """
        check = health_pb2_grpc.HealthStub(self).Check
        end_s, number = time.monotonic() + deadline_s, 0
        while True:
            left_s = end_s - time.monotonic()
            try:
                answer = check(health_pb2.HealthCheckRequest(), timeout=max(0.1, min(_HEALTH_TRY_S, left_s)))
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                problem: Unavailable = TimedOut(f"{self._line.called('')} is up but does not serve yet")
            except Unavailable as error:
                problem = error
            pause = pause_s(number, longest_s=_LONGEST_PAUSE_S)
            if end_s - time.monotonic() <= pause:
                raise problem
            time.sleep(pause)
            number += 1

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Request], bytes] | None = None,
        response_deserializer: Callable[[bytes], Response] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.UnaryUnaryMultiCallable[Request, Response]:
        made: Any = UnaryUnary(self._line, method, self._channel.unary_unary, request_serializer, response_deserializer)
        return made  # type: ignore[no-any-return]

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[Request], bytes] | None = None,
        response_deserializer: Callable[[bytes], Response] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.UnaryStreamMultiCallable[Request, Response]:
        made: Any = UnaryStream(
            self._line, method, self._channel.unary_stream, request_serializer, response_deserializer
        )
        return made  # type: ignore[no-any-return]

    def stream_unary(
        self,
        method: str,
        request_serializer: Callable[[Request], bytes] | None = None,
        response_deserializer: Callable[[bytes], Response] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.StreamUnaryMultiCallable[Request, Response]:
        made: Any = StreamUnary(
            self._line, method, self._channel.stream_unary, request_serializer, response_deserializer
        )
        return made  # type: ignore[no-any-return]

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Request], bytes] | None = None,
        response_deserializer: Callable[[bytes], Response] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.StreamStreamMultiCallable[Request, Response]:
        made: Any = StreamStream(
            self._line, method, self._channel.stream_stream, request_serializer, response_deserializer
        )
        return made  # type: ignore[no-any-return]

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False) -> None:
        """Tells of changes of the connection's state."""
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Ends what `subscribe` began."""
        self._channel.unsubscribe(callback)


def connect(
    service: str,
    endpoint: str,
    credentials: Credentials,
    *,
    idempotent: Collection[str] = (),
    deadline_s: float = CALL_DEADLINE_S,
    stream_deadline_s: float = STREAM_DEADLINE_S,
    patience_s: float | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    tracer: trace.Tracer | None = None,
) -> Channel:
    """A channel to `service` (its short name, for errors) at host:port; connects at the first call.

    idempotent: names of methods (such as "GetJob") that are tried again within the call's deadline when the service
    is unavailable, beside those that the contract declares so. deadline_s, stream_deadline_s: of each call that names
    no `timeout`. patience_s: how long such a call waits for a service that is not up (None: to its deadline).
    Raises PhalanxError when a file cannot be read or the address is none.
    """
    split_address(endpoint, f"address of {service}")
    policy = Policy(deadline_s, stream_deadline_s, max_message_bytes, patience_s, frozenset(idempotent))
    token = TokenFile(credentials.token) if credentials.token else None
    channel = grpc.secure_channel(endpoint, channel_credentials(credentials), channel_options(max_message_bytes))
    return Channel(channel, Line(service, endpoint, policy, credentials, token, tracer))


def connect_client(config: ClientConfig, service: str, **settings: Any) -> Channel:
    """`connect` for a client's context."""
    return connect(service, config.endpoint(service), config.security, **settings)


def connect_service(config: ServiceConfig, service: str, **settings: Any) -> Channel:
    """`connect` from one service to another; raises PhalanxError when its file names no address for it."""
    context = ClientConfig(config.services, config.security.credentials)
    return connect(service, context.endpoint(service), config.security.credentials, **settings)


__all__ = ["Channel", "NotUp", "TimedOut", "Unavailable", "connect", "connect_client", "connect_service"]
