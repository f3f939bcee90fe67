"""Traces of a process, sent to the monitor over the same mTLS as every call.

Spans wait in a bounded queue and are dropped when it is full: nothing that is traced ever waits for the monitor. The
exporter has a channel of its own, outside `phalanx.rpc.client`, and servers don't trace telemetry: sending traces makes
no traces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from phalanx.rpc.config import Credentials
from phalanx.rpc.credentials import TokenFile, channel_credentials

QUEUE_SPANS, BATCH_SPANS, EVERY_S, EXPORT_S = 2048, 256, 2.0, 3.0


@dataclass(frozen=True, slots=True)
class Tracing:
    """The traces of one process. tracer: for serve() and connect(); a no-op where nothing is sent."""

    tracer: trace.Tracer
    _provider: TracerProvider | None = None
    _exporter: OTLPSpanExporter | None = None

    def flush(self, timeout_s: float) -> bool:
        """Sends what waits, within the time; False when some is left."""
        return self._provider is None or _is_done_within(timeout_s, self._provider.force_flush)

    def stop(self) -> None:
        """Sends what waits, for `EXPORT_S` at most, and ends."""
        if self._provider is not None and not _is_done_within(EXPORT_S, self._provider.shutdown):
            assert self._exporter is not None
            self._exporter.shutdown()


def start_tracing(
    name: str, monitor: str = "", credentials: Credentials | None = None, *, ratio: float = 1.0
) -> Tracing:
    """Begins to send the spans of the process `name` to the monitor at host:port; off without an address.

    ratio: of traces that begin here to keep. The process's global provider is left alone: pass `.tracer` on.
    """
    if not monitor or credentials is None:
        return Tracing(trace.NoOpTracer())
    exporter = OTLPSpanExporter(
        endpoint=monitor, credentials=exporter_credentials(credentials), timeout=EXPORT_S, insecure=False
    )
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"phalanx-{name}"}),
        sampler=ParentBased(TraceIdRatioBased(ratio)),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUE_SPANS,
            max_export_batch_size=BATCH_SPANS,
            schedule_delay_millis=EVERY_S * 1000,
            export_timeout_millis=EXPORT_S * 1000,
        )
    )
    return Tracing(provider.get_tracer("phalanx"), provider, exporter)


def _is_done_within(timeout_s: float, act: Callable[[], object]) -> bool:
    """Acts in a thread that nobody waits for past the time: the SDK's own time-outs don't hold."""
    acting = threading.Thread(target=act, name="phalanx-traces", daemon=True)
    acting.start()
    acting.join(timeout_s)
    return not acting.is_alive()


class _TokenOnEveryCall(grpc.AuthMetadataPlugin):
    """The token as its file now has it, for channels that are not ours."""

    def __init__(self, token: TokenFile) -> None:
        self._token = token

    def __call__(self, context: grpc.AuthMetadataContext, callback: Callable[..., None]) -> None:
        try:
            callback((("authorization", f"Bearer {self._token.read()}"),), None)
        except Exception as error:  # noqa: BLE001 - gRPC fails the call with it
            callback((), error)


def exporter_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """For an exporter of OpenTelemetry: mTLS, and the token with every call; raises PhalanxError for a missing file."""
    channel = channel_credentials(credentials)
    if credentials.token is None:
        return channel
    on_call = grpc.metadata_call_credentials(_TokenOnEveryCall(TokenFile(credentials.token)), name="phalanx")
    return grpc.composite_channel_credentials(channel, on_call)
