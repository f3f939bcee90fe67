"""Serves gRPC: mTLS, tokens and roles, health, reflection, limits, audit, figures, traces.

Capacity. gRPC's threads in Python are one a running call. The pool holds `max_streams` + `max_calls` threads, made when
first needed; the cap on streams keeps `max_calls` of them for unary calls however many streams are open. A stream
above the cap is refused with RESOURCE_EXHAUSTED and its figures; so are calls above the pool and `max_waiting`.

A peer that is gone (machine, network, SIGSTOP) is noticed by HTTP/2 pings within PING_EVERY_S + PING_ANSWER_S; its
calls end, and handlers learn it by `ended(context)`.

Killed: connections break, clients see UNAVAILABLE and come back. Nothing here outlives the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]
from opentelemetry import trace

from phalanx.core.errors import PhalanxError
from phalanx.rpc.config import ServiceConfig, split_address
from phalanx.rpc.files import read_bytes
from phalanx.rpc.handlers import Access, Gate, Interceptor
from phalanx.rpc.handshakes import HandshakeAudit
from phalanx.rpc.limits import Limits, server_options
from phalanx.rpc.metrics import CallMetrics, Metrics, MetricsServer
from phalanx.rpc.pki import check_pair
from phalanx.rpc.sockets import refuse_taken
from phalanx.rpc.tokens import EVERYONE, Verifier

Adder = Callable[[grpc.Server], None]

STOP_GRACE_S = 5.0
_LOG = logging.getLogger(__name__)
STANDARD_ACCESS: Access = {
    f"/{health.SERVICE_NAME}/Check": EVERYONE,
    f"/{health.SERVICE_NAME}/Watch": EVERYONE,
    f"/{health.SERVICE_NAME}/List": EVERYONE,
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": EVERYONE,
}


class Server:
    """A running server. address: host:port, or unix:path, as bound. metrics_address: "" when none is served."""

    def __init__(
        self,
        server: grpc.Server,
        interceptor: Interceptor,
        pool: ThreadPoolExecutor,
        health_of: health.HealthServicer,
        services: Sequence[str],
        address: str,
        metrics_server: MetricsServer | None,
        handshakes: HandshakeAudit | None = None,
    ) -> None:
        self.address, self.metrics_address = address, metrics_server.address if metrics_server else ""
        self._server, self._interceptor, self._pool = server, interceptor, pool
        self._health, self._services, self._metrics_server = health_of, services, metrics_server
        self._handshakes = handshakes

    @property
    def where(self) -> str:
        """Its addresses in words, for the log."""
        return f"{self.address}, metrics at {self.metrics_address or 'none'}"

    def set_serving(self, is_serving: bool, service: str | None = None) -> None:
        """Tells health of one service by its full name, or of all."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._services if service is None else (service,):
            self._health.set(name, status)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Refuses new calls, ends streams at once, lets unary calls finish for `grace_s`, then cancels them."""
        self._health.enter_graceful_shutdown()
        stopped = self._server.stop(grace_s)
        self._interceptor.streams.stop()
        if not stopped.wait(grace_s + 5):
            _LOG.warning("calls of %s did not end within %g s of their cancellation", self.address, 5)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for each in (self._handshakes, self._metrics_server):
            if each is not None:
                each.close()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the server has ended; True when the time ran out first."""
        return self._server.wait_for_termination(timeout_s)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_back: TracebackType | None
    ) -> None:
        self.stop()


def serve(
    config: ServiceConfig,
    adders: Sequence[Adder],
    access: Access,
    *,
    metrics: Metrics | None = None,
    tracer: trace.Tracer | None = None,
) -> Server:
    """Starts to serve at `config.listen` over mTLS.

    adders: each adds one servicer, such as `lambda server: add_TrainServiceServicer_to_server(servicer, server)`.
    access: for each full method name (`/package.Service/Method`) the roles that may call it; a method that is not in
    it is refused. Health and reflection are open to every role. Raises PhalanxError when the address is taken or a
    certificate or key is missing.
    """
    host, port = split_address(config.listen, f"listen address of {config.name}")
    refuse_taken(host, port, config.name)
    security = config.security
    metrics = metrics or Metrics()
    interceptor = Interceptor(
        Gate(Verifier.load(security.token_key)), {**STANDARD_ACCESS, **access}, config.limits, metrics.calls, tracer
    )
    check_pair(security.cert, security.key, f"the key of {config.name}", "remove both and run `phalanx up`")
    credentials = grpc.ssl_server_credentials(
        [(_pem(config, "key"), _pem(config, "cert"))], _pem(config, "ca"), require_client_auth=True
    )
    return start_server(
        config.name,
        adders,
        tuple(dict.fromkeys(method.split("/")[1] for method in access)),
        interceptor,
        config.limits,
        lambda server: f"{host}:{server.add_secure_port(config.listen, credentials)}",
        lambda is_healthy: MetricsServer(metrics, config.metrics, is_healthy) if config.metrics else None,
        metrics.calls,
    )


def start_server(
    name: str,
    adders: Sequence[Adder],
    services: Sequence[str],
    interceptor: Interceptor,
    limits: Limits,
    bind: Callable[[grpc.Server], str],
    serve_metrics: Callable[[Callable[[], bool]], MetricsServer | None],
    handshakes_of: CallMetrics | None = None,
) -> Server:
    """A started server with the room's rules, bound by `bind`, which gives its address. handshakes_of: where refused
    TLS handshakes are counted; None without TLS.
    """
    threads = limits.max_streams + limits.max_calls
    pool = ThreadPoolExecutor(threads, thread_name_prefix=f"phalanx-{name}")
    server = grpc.server(
        pool,
        interceptors=[interceptor],
        options=server_options(limits),
        maximum_concurrent_rpcs=threads + limits.max_waiting,
    )
    health_of = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_of, server)
    for add in adders:
        add(server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = _bound(name, server, bind)
    metrics_server = serve_metrics(lambda: not interceptor.streams.is_stopping)
    server.start()
    handshakes = HandshakeAudit(handshakes_of) if handshakes_of else None
    handle = Server(server, interceptor, pool, health_of, ("", *services), address, metrics_server, handshakes)
    handle.set_serving(True)
    return handle


def all_methods(services: Sequence[ServiceDescriptor]) -> frozenset[str]:
    """The full names of all methods, to be compared with an access table by a test."""
    return frozenset(f"/{service.full_name}/{method.name}" for service in services for method in service.methods)


def access_problems(access: Mapping[str, object], services: Sequence[ServiceDescriptor]) -> list[str]:
    """What is wrong with an access table: methods without an entry, entries without a method; empty when it fits."""
    methods = all_methods(services)
    missing = [f"{method} is in no access table" for method in sorted(methods - access.keys())]
    return missing + [f"{method} is no method" for method in sorted(access.keys() - methods)]


def _bound(name: str, server: grpc.Server, bind: Callable[[grpc.Server], str]) -> str:
    try:
        return bind(server)
    except RuntimeError as error:
        raise PhalanxError(
            f"address of {name}",
            expected=f"one that can be listened on ({error})",
            remedy="end the process that uses it, or choose another one",
        ) from error


def _pem(config: ServiceConfig, which: str) -> bytes:
    path = {"ca": config.security.ca, "cert": config.security.cert, "key": config.security.key}[which]
    return read_bytes(path, f"the {which} of {config.name}", "run `phalanx up`, which makes it")
