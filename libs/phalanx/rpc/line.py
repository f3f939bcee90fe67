"""What all calls of one channel share: who is called, the token, the trace, the meaning of an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import MethodOptions
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc.config import Credentials
from phalanx.rpc.credentials import TokenFile
from phalanx.rpc.diagnosis import connection_error
from phalanx.rpc.errors import NotUp, Unavailable
from phalanx.rpc.retry import pause_s
from phalanx.rpc.status import Called, has_details, raised, too_large

Metadata = tuple[tuple[str, str | bytes], ...]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Policy:
    """How calls of a channel behave unless a call says otherwise.

    deadline_s, stream_deadline_s: of a call in all. patience_s: how long a retried call waits for a service that is
    not up; None: to its deadline. idempotent: names of methods that may be tried again, beside those whose contract
    says `option idempotency_level`.
    """

    deadline_s: float
    stream_deadline_s: float
    max_message_bytes: int
    patience_s: float | None = None
    idempotent: frozenset[str] = frozenset()

    def may_retry(self, method: str) -> bool:
        """Whether the method (`/package.Service/Method`) may be tried again when its fate is unknown."""
        return method.rsplit("/", 1)[-1] in self.idempotent or _is_declared_idempotent(method)


def _is_declared_idempotent(method: str) -> bool:
    try:
        found = descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", "."))
    except KeyError:
        return False
    return bool(found.GetOptions().idempotency_level != MethodOptions.IDEMPOTENCY_UNKNOWN)


class Line:
    """One service as one client sees it."""

    def __init__(
        self,
        service: str,
        endpoint: str,
        policy: Policy,
        credentials: Credentials | None,
        token: TokenFile | None,
        tracer: trace.Tracer | None,
    ) -> None:
        self.service, self.endpoint, self.policy = service, endpoint, policy
        self._credentials, self._token = credentials, token
        self._tracer = tracer or trace.get_tracer("phalanx.rpc")

    def __repr__(self) -> str:
        return f"Line({self.service!r}, {self.endpoint!r})"

    def called(self, method: str) -> Called:
        """For the words of an error."""
        return Called(self.service, self.endpoint, method.lstrip("/"))

    def serialized(self, method: str, message: Any, serializer: Callable[[Any], bytes] | None) -> bytes:
        """The bytes of a request; raises Exhausted above the limit."""
        data = serializer(message) if serializer else bytes(message)
        if len(data) > self.policy.max_message_bytes:
            raise too_large(method.lstrip("/"), len(data), self.policy.max_message_bytes)
        return data

    def metadata(self, given: Sequence[tuple[str, str | bytes]] | None, span: trace.Span) -> Metadata:
        """What travels with a call: the caller's own, the token as it now is, the trace."""
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
        token = (("authorization", f"Bearer {self._token.read()}"),) if self._token else ()
        return (*(given or ()), *token, *carrier.items())

    def span(self, method: str) -> trace.Span:
        """A client's span, to be ended by whoever ends the call."""
        attributes = {"rpc.system": "grpc", "rpc.method": method, "server.address": self.endpoint}
        return self._tracer.start_span(method.lstrip("/"), kind=trace.SpanKind.CLIENT, attributes=attributes)

    @contextmanager
    def spanned(self, method: str) -> Iterator[trace.Span]:
        """A client's span around a block; an error marks it."""
        span = self.span(method)
        try:
            yield span
        except (PhalanxError, OutsideError) as error:
            span.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.end()

    def meaning(self, method: str, call: grpc.Call, deadline_s: float) -> PhalanxError | OutsideError:
        """The error that a call's end means to a caller."""
        called = self.called(method)
        if call.code() == grpc.StatusCode.UNAVAILABLE and not has_details(call):
            return connection_error(called, call.details() or "", self._credentials)
        return raised(called, call, deadline_s)

    def tried(self, method: str, deadline_s: float, attempt: Callable[[float], Result]) -> Result:
        """`attempt(seconds it may take)`, again after Unavailable where the method allows, until the deadline.

        Where it may be tried again, one try takes a third of the deadline at most, or the channel's default where that
        is longer.
        """
        began_s = time.monotonic()
        may_retry = self.policy.may_retry(method)
        longest_try_s = max(self.policy.deadline_s, deadline_s / 3) if may_retry else deadline_s
        number = 0
        while True:
            left_s = began_s + deadline_s - time.monotonic()
            try:
                return attempt(max(0.001, min(left_s, longest_try_s)))
            except grpc.RpcError as error:
                call: Any = error  # the errors that gRPC raises are calls as well
                meant = self.meaning(method, call, deadline_s)
                pause = pause_s(number)
                spent_s = time.monotonic() - began_s + pause
                if not may_retry or not self._is_worth_another(meant, spent_s, deadline_s):
                    raise meant from error
            time.sleep(pause)
            number += 1

    def _is_worth_another(self, error: Exception, spent_s: float, deadline_s: float) -> bool:
        patience_s = self.policy.patience_s
        if isinstance(error, NotUp) and patience_s is not None and spent_s >= patience_s:
            return False
        return isinstance(error, Unavailable) and spent_s < deadline_s
