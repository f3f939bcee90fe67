"""The four kinds of call, each with a deadline, a size check, the token, a span, and errors of our own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import grpc
from opentelemetry import trace

from phalanx.rpc.line import Line

Request = TypeVar("Request")
Response = TypeVar("Response")
Serializer = Callable[[Any], bytes]
Given = Sequence[tuple[str, str | bytes]]


class Outgoing:
    """The requests of a stream, serialized one by one in gRPC's thread. A request that cannot be sent ends the call,
    and `problem` says why.
    """

    def __init__(self, line: Line, method: str, requests: Iterator[Any], serializer: Serializer | None) -> None:
        self._line, self._method, self._requests, self._serializer = line, method, requests, serializer
        self._call: grpc.Call | None = None
        self._has_call = threading.Event()
        self.problem: Exception | None = None

    def belongs_to(self, call: grpc.Call) -> None:
        """The call that is cancelled when a request cannot be sent."""
        self._call = call
        self._has_call.set()

    def __iter__(self) -> Iterator[bytes]:
        try:
            for request in self._requests:
                yield self._line.serialized(self._method, request, self._serializer)
        except Exception as error:  # noqa: BLE001 - raised again by whoever reads the responses
            self.problem = error
            self._has_call.wait()
            assert self._call is not None
            self._call.cancel()


class Stream(Generic[Response]):
    """The responses of a call, one by one. Cancelled by its own side, it simply ends; a context manager cancels it."""

    def __init__(
        self, line: Line, method: str, call: Any, span: trace.Span, deadline_s: float, outgoing: Outgoing | None
    ) -> None:
        self._line, self._method, self._call, self._span = line, method, call, span
        self._deadline_s, self._outgoing = deadline_s, outgoing
        self._is_cancelled = False

    def __iter__(self) -> Iterator[Response]:
        return self

    def __next__(self) -> Response:
        try:
            response: Response = next(self._call)
        except StopIteration:
            self._span.end()
            raise
        except grpc.RpcError as error:
            self._fail(error)
        return response

    def _fail(self, error: grpc.RpcError) -> NoReturn:
        problem = self._outgoing.problem if self._outgoing else None
        if problem is None and self._is_cancelled:
            self._span.end()
            raise StopIteration
        meant = problem or self._line.meaning(self._method, self._call, self._deadline_s)
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, type(meant).__name__))
        self._span.end()
        raise meant from error

    def cancel(self) -> bool:
        """Ends the call; whoever iterates sees the end."""
        self._is_cancelled = True
        return bool(self._call.cancel())

    def __enter__(self) -> Stream[Response]:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        self._span.end()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Called when the call is over; False when it is already."""
        return bool(self._call.add_callback(callback))

    def is_active(self) -> bool:
        """Whether the call is under way."""
        return bool(self._call.is_active())

    def time_remaining(self) -> float:
        """Seconds to the deadline."""
        return float(self._call.time_remaining())

    def code(self) -> grpc.StatusCode:
        """How the call ended; waits for it."""
        code: grpc.StatusCode = self._call.code()
        return code

    def details(self) -> str:
        """The message of the status; waits for the end."""
        return str(self._call.details())

    def initial_metadata(self) -> Any:
        """What the server sent first."""
        return self._call.initial_metadata()

    def trailing_metadata(self) -> Any:
        """What the server sent last; waits for the end."""
        return self._call.trailing_metadata()


class _Method(Generic[Request, Response]):
    """A method of a channel. `make` is the underlying channel's way to make its kind of call on bytes."""

    def __init__(
        self,
        line: Line,
        method: str,
        make: Callable[..., Any],
        serializer: Serializer | None,
        deserializer: Callable[[bytes], Any] | None,
    ) -> None:
        self._line, self._method, self._serializer = line, method, serializer
        self._inner: Any = make(method, None, deserializer)

    def future(self, *_: Any, **__: Any) -> NoReturn:
        """Not offered: its errors would not be ours."""
        raise NotImplementedError("call the method in a thread of your own instead of .future()")


class UnaryUnary(_Method[Request, Response]):
    """One request, one response; tried again where that is safe."""

    def __call__(
        self,
        request: Request,
        timeout: float | None = None,
        metadata: Given | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Response:
        return self.with_call(request, timeout, metadata, credentials, wait_for_ready, compression)[0]

    def with_call(
        self,
        request: Request,
        timeout: float | None = None,
        metadata: Given | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> tuple[Response, grpc.Call]:
        line, deadline_s = self._line, self._line.policy.deadline_s if timeout is None else timeout
        with line.spanned(self._method) as span:
            data = line.serialized(self._method, request, self._serializer)

            def attempt(seconds: float) -> tuple[Response, grpc.Call]:
                sent = line.metadata(metadata, span)
                found: tuple[Response, grpc.Call] = self._inner.with_call(
                    data, seconds, sent, credentials, wait_for_ready, compression
                )
                return found

            return line.tried(self._method, deadline_s, attempt)


class UnaryStream(_Method[Request, Response]):
    """One request, a stream of responses; `follow` makes it outlive its connection."""

    def __call__(
        self,
        request: Request,
        timeout: float | None = None,
        metadata: Given | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Stream[Response]:
        line, deadline_s = self._line, self._line.policy.stream_deadline_s if timeout is None else timeout
        data = line.serialized(self._method, request, self._serializer)
        span = line.span(self._method)
        sent = line.metadata(metadata, span)
        call = self._inner(data, deadline_s, sent, credentials, wait_for_ready, compression)
        return Stream(line, self._method, call, span, deadline_s, None)


class StreamStream(_Method[Request, Response]):
    """A stream of requests, a stream of responses."""

    def __call__(
        self,
        request_iterator: Iterator[Request],
        timeout: float | None = None,
        metadata: Given | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Stream[Response]:
        line, deadline_s = self._line, self._line.policy.stream_deadline_s if timeout is None else timeout
        outgoing = Outgoing(line, self._method, request_iterator, self._serializer)
        span = line.span(self._method)
        sent = line.metadata(metadata, span)
        call = self._inner(iter(outgoing), deadline_s, sent, credentials, wait_for_ready, compression)
        outgoing.belongs_to(call)
        return Stream(line, self._method, call, span, deadline_s, outgoing)


class StreamUnary(_Method[Request, Response]):
    """A stream of requests, one response; never tried again, for the requests are spent."""

    def __call__(
        self,
        request_iterator: Iterator[Request],
        timeout: float | None = None,
        metadata: Given | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Response:
        return self.with_call(request_iterator, timeout, metadata, credentials, wait_for_ready, compression)[0]

    def with_call(
        self,
        request_iterator: Iterator[Request],
        timeout: float | None = None,
        metadata: Given | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> tuple[Response, grpc.Call]:
        line, deadline_s = self._line, self._line.policy.stream_deadline_s if timeout is None else timeout
        outgoing = Outgoing(line, self._method, request_iterator, self._serializer)
        with line.spanned(self._method) as span:
            sent = line.metadata(metadata, span)
            call = self._inner.future(iter(outgoing), deadline_s, sent, credentials, wait_for_ready, compression)
            outgoing.belongs_to(call)
            try:
                return call.result(), call
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                raise outgoing.problem or line.meaning(self._method, call, deadline_s) from error
