"""A process's own Prometheus registry, the figures of its calls, and the small HTTP server that shows them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from phalanx.core.errors import PhalanxError
from phalanx.rpc.config import split_address
from phalanx.rpc.sockets import refuse_taken

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
IDLE_CONNECTION_S = 30
PROCESS_HEADER = "X-Phalanx-Process"


class CallMetrics:
    """The figures of the calls that one server answers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["method", "code"]
        self.calls = Counter("phalanx_rpc_calls", "Calls that ended, by status code", labels, registry=registry)
        self.seconds = Histogram(
            "phalanx_rpc_call_seconds", "Time a unary call took", ["method"], buckets=SECONDS, registry=registry
        )
        self.streams = Gauge("phalanx_rpc_open_streams", "Streams open now", registry=registry)
        self.refusals = Counter(
            "phalanx_rpc_refusals", "Calls refused for who made them", ["method", "code"], registry=registry
        )


class Metrics:
    """The registry of one process; services add their own figures to `registry`. `calls` are those of its server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = CallMetrics(self.registry)
        ProcessCollector(registry=self.registry)


class MetricsServer:
    """Serves `/metrics` and `/healthz` by HTTP until closed. Answers carry the pid of this process (PROCESS_HEADER), so
    that whoever started it knows that no other process has its port.
    """

    def __init__(self, metrics: Metrics, listen: str, is_healthy: Callable[[], bool] = lambda: True) -> None:
        """listen: host:port, port 0 for a free one. Raises PhalanxError when the port is taken."""
        host, port = split_address(listen, "metrics address")
        refuse_taken(host, port, "metrics")
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(metrics, is_healthy))
        except OSError as error:
            raise PhalanxError(
                "metrics address",
                value=listen,
                expected=f"an address to listen on ({error.strerror})",
                remedy="choose another one",
            ) from error
        self._server.daemon_threads = True
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="phalanx-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _handler(metrics: Metrics, is_healthy: Callable[[], bool]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_CONNECTION_S

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, generate_latest(metrics.registry), CONTENT_TYPE_LATEST)
            elif path == "/healthz":
                healthy = is_healthy()
                self._answer(200 if healthy else 503, b"ok\n" if healthy else b"not serving\n", "text/plain")
            else:
                self._answer(404, b"/metrics and /healthz are here\n", "text/plain")

        def _answer(self, code: int, body: bytes, content_type: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header(PROCESS_HEADER, str(os.getpid()))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Scrapes are no news."""

    return Handler
