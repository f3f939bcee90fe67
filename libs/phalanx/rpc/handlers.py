"""What happens around every handler: who calls, whether it may, how many, how large, how it ended.

The order: count and trace, authenticate, look the role up in the access table, take a place among the streams, check
sizes, call the handler, turn its error into a status. A handler asks `caller(context)` who calls.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grpc
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc.audit import audit_refusal
from phalanx.rpc.errors import Denied, Exhausted, Unauthenticated, Unavailable
from phalanx.rpc.limits import Limits
from phalanx.rpc.metrics import CallMetrics
from phalanx.rpc.status import DETAILS_KEY, WireStatus, internal_status, too_large, wire_status
from phalanx.rpc.tokens import Caller, Role, Verifier

Access = Mapping[str, Collection[Role]]
Behaviour = Callable[[Any, grpc.ServicerContext], Any]

UNTRACED = ("/grpc.", "/opentelemetry.")
_CALLER = "phalanx_caller"
_LOG = logging.getLogger(__name__)


def caller(context: grpc.ServicerContext) -> Caller:
    """Who makes the call that a handler is answering."""
    found = getattr(context, _CALLER, None)
    assert isinstance(found, Caller), "caller() is for handlers of a server made by phalanx.rpc"
    return found


def ended(context: grpc.ServicerContext) -> threading.Event:
    """Set when the call is over, for whatever reason: answered, cancelled, deadline, dead peer, a server that stops.

    A handler of a stream waits on this, or is woken by it, instead of holding its thread for a peer that is gone.
    """
    over = threading.Event()
    if not context.add_callback(over.set):
        over.set()
    return over


@dataclass(frozen=True, slots=True)
class Gate:
    """Tells who calls. verifier: checks the token; without one everybody is `default`."""

    verifier: Verifier | None
    default: Caller | None = None

    def admit(self, context: grpc.ServicerContext) -> Caller:
        """Raises Unauthenticated."""
        spiffe_id = spiffe_id_of(context)
        if self.verifier is None:
            assert self.default is not None
            return replace(self.default, spiffe_id=spiffe_id)
        given = [value for key, value in context.invocation_metadata() if key == "authorization"]
        scheme, _, token = given[0].partition(" ") if given and isinstance(given[0], str) else ("", "", "")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated(
                "token", expected="one with every call", remedy="name the token's file in the client's context"
            )
        return self.verifier.verify(token.strip(), spiffe_id)


def spiffe_id_of(context: grpc.ServicerContext) -> str:
    """The SPIFFE id in the peer's certificate, "" without one."""
    found = context.auth_context().get("peer_spiffe_id")
    return bytes(found[0]).decode() if found else ""


class OpenStreams:
    """The streams that are open, up to a cap, so that a stop ends them at once."""

    def __init__(self, limit: int, metrics: CallMetrics) -> None:
        self._limit, self._metrics = limit, metrics
        self._lock = threading.Lock()
        self._open: set[grpc.ServicerContext] = set()
        self._is_stopping = False

    def enter(self, context: grpc.ServicerContext) -> None:
        """Raises Exhausted when as many are open as may be, Unavailable when the server stops."""
        with self._lock:
            if self._is_stopping:
                raise Unavailable("the service is stopping")
            if len(self._open) >= self._limit:
                raise Exhausted(
                    "open streams",
                    value=len(self._open) + 1,
                    expected=f"at most {self._limit} at a time",
                    remedy="close some, or raise limits.max_streams of the service",
                )
            self._open.add(context)
            self._metrics.streams.set(len(self._open))

    def leave(self, context: grpc.ServicerContext) -> None:
        """The stream is over."""
        with self._lock:
            self._open.discard(context)
            self._metrics.streams.set(len(self._open))

    def stop(self) -> None:
        """Ends every stream; clients see that the service went away and follow it to where it comes back."""
        with self._lock:
            self._is_stopping = True
            contexts = tuple(self._open)
        for context in contexts:
            context.cancel()

    @property
    def is_stopping(self) -> bool:
        """Whether the server is about to end."""
        with self._lock:
            return self._is_stopping


class Interceptor(grpc.ServerInterceptor):
    """Puts the room's rules around every handler of a server."""

    def __init__(
        self, gate: Gate, access: Access, limits: Limits, metrics: CallMetrics, tracer: trace.Tracer | None = None
    ) -> None:
        self._gate, self._access, self._limits, self._metrics = gate, access, limits, metrics
        self._tracer = tracer or trace.get_tracer("phalanx.rpc")
        self.streams = OpenStreams(limits.max_streams, metrics)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler with the rules around it; an unknown method is refused by them like any other."""
        method = handler_call_details.method
        handler: Any = continuation(handler_call_details)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._streaming(method, _unknown, takes_stream=True))
        make = getattr(grpc, f"{_kind(handler)}_rpc_method_handler")
        wrapped = make(self._wrap(method, handler), handler.request_deserializer, handler.response_serializer)
        assert isinstance(wrapped, grpc.RpcMethodHandler)
        return wrapped

    def _wrap(self, method: str, handler: Any) -> Behaviour:
        inner: Behaviour = getattr(handler, _kind(handler))
        if handler.response_streaming:
            return self._streaming(method, inner, takes_stream=handler.request_streaming)
        return self._single(method, inner, takes_stream=handler.request_streaming)

    def _single(self, method: str, inner: Behaviour, *, takes_stream: bool) -> Behaviour:
        def behave(request: Any, context: grpc.ServicerContext) -> Any:
            with self._rules(method, context, is_stream=takes_stream, spans=True):
                return self._fitting(method, inner(self._incoming(method, request, takes_stream), context))

        return behave

    def _streaming(self, method: str, inner: Behaviour, *, takes_stream: bool) -> Behaviour:
        def behave(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._rules(method, context, is_stream=True, spans=False):
                for response in inner(self._incoming(method, request, takes_stream), context):
                    yield self._fitting(method, response)
                if self.streams.is_stopping:
                    raise Unavailable("the service is stopping")

        return behave

    def _incoming(self, method: str, request: Any, takes_stream: bool) -> Any:
        return (self._fitting(method, each) for each in request) if takes_stream else self._fitting(method, request)

    def _fitting(self, method: str, message: Any) -> Any:
        size = message.ByteSize() if hasattr(message, "ByteSize") else len(message)
        if size > self._limits.max_message_bytes:
            raise too_large(method, size, self._limits.max_message_bytes)
        return message

    @contextmanager
    def _rules(self, method: str, context: grpc.ServicerContext, *, is_stream: bool, spans: bool) -> Iterator[None]:
        began_s, code = time.monotonic(), grpc.StatusCode.CANCELLED
        with self._span(method, context, is_current=spans) as span:
            try:
                self._admit(method, context)
                if is_stream:
                    self.streams.enter(context)
                try:
                    yield
                finally:
                    if is_stream:
                        self.streams.leave(context)
                code = context.code() or grpc.StatusCode.OK  # type: ignore[attr-defined]
            except Exception as error:
                code, status = self._judged(method, context, error, span)
                if status is None:
                    raise
                context.set_trailing_metadata(((DETAILS_KEY, status.details),))
                context.abort(status.code, status.message)
            finally:
                self._count(method, code, time.monotonic() - began_s, is_stream)
                span.set_attribute("rpc.grpc.status_code", code.value[0])

    def _admit(self, method: str, context: grpc.ServicerContext) -> None:
        who = self._gate.admit(context)
        setattr(context, _CALLER, who)
        roles = self._access.get(method)
        if roles is None:
            raise Denied(f"method {method}", expected="one that this service opens to callers", remedy="check its name")
        if who.role not in roles:
            expected = " or ".join(sorted(roles)) or "nobody"
            raise Denied(
                f"role for {method}", value=str(who.role), expected=expected, remedy="use a token of that role"
            )

    def _judged(
        self, method: str, context: grpc.ServicerContext, error: Exception, span: trace.Span
    ) -> tuple[grpc.StatusCode, WireStatus | None]:
        """The code with which the call ends, and the status to send; None for what a handler aborted by itself and for
        a caller that is gone.
        """
        aborted: grpc.StatusCode | None = context.code()  # type: ignore[attr-defined]
        if aborted not in (None, grpc.StatusCode.OK):
            return aborted, None
        if isinstance(error, grpc.RpcError) and not context.is_active():
            return grpc.StatusCode.CANCELLED, None
        if isinstance(error, Denied):
            self._audit(method, context, error)
        if isinstance(error, PhalanxError | OutsideError):
            status = wire_status(error)
        else:
            error_id = secrets.token_hex(6)
            _LOG.error("unexpected error %s in %s", error_id, method, exc_info=error)
            status = internal_status(error_id)
            span.record_exception(error)
        span.set_status(trace.Status(trace.StatusCode.ERROR, status.code.name))
        return status.code, status

    def _audit(self, method: str, context: grpc.ServicerContext, error: Denied) -> None:
        who: Caller | None = getattr(context, _CALLER, None)
        subject = who.subject if who else ""
        audit_refusal(
            method=method, peer=context.peer(), spiffe_id=spiffe_id_of(context), subject=subject, why=str(error)
        )
        self._metrics.refusals.labels(self._label(method), wire_status(error).code.name).inc()

    def _count(self, method: str, code: grpc.StatusCode, took_s: float, is_stream: bool) -> None:
        self._metrics.calls.labels(self._label(method), code.name).inc()
        if not is_stream:
            self._metrics.seconds.labels(self._label(method)).observe(took_s)

    def _label(self, method: str) -> str:
        return method if method in self._access else "unknown"

    @contextmanager
    def _span(self, method: str, context: grpc.ServicerContext, *, is_current: bool) -> Iterator[trace.Span]:
        if method.startswith(UNTRACED):
            yield trace.INVALID_SPAN
            return
        carrier = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        parent = TraceContextTextMapPropagator().extract(carrier)
        attributes = {"rpc.system": "grpc", "rpc.method": method}
        span = self._tracer.start_span(method.lstrip("/"), parent, kind=trace.SpanKind.SERVER, attributes=attributes)
        try:
            if is_current:
                with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                    yield span
            else:
                yield span
        finally:
            span.end()


def _kind(handler: Any) -> str:
    asked = "stream" if handler.request_streaming else "unary"
    return f"{asked}_{'stream' if handler.response_streaming else 'unary'}"


def _unknown(request: Any, context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "this service has no such method")
