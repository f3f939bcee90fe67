"""What people watch: figures, health over HTTP, traces."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from typing import Any

import grpc
import pytest
import rpc_kit as kit
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from phalanx.core.errors import PhalanxError
from phalanx.rpc import AGENTS, SERVICES, Metrics, NotFound, Role, serve
from phalanx.rpc.metrics import MetricsServer
from phalanx.rpc.testing import Cluster
from phalanx.rpc.tracing import EXPORT_S, start_tracing


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_of_a_server_count_calls_by_method_and_code(cluster: Cluster) -> None:
    def do(request: Any, context: grpc.ServicerContext) -> Any:
        raise NotFound("x", expected="y", remedy="z")

    with kit.serve_echo(cluster, kit.Echo(Do=do), config={"metrics": "127.0.0.1:0"}) as server:
        with kit.call_echo(cluster, server) as channel:
            kit.stub(channel).Say(kit.pb.Words())
            list(kit.stub(channel).Count(kit.pb.Cursor()))
            with pytest.raises(NotFound):
                kit.stub(channel).Do(kit.pb.Words())
        status, text = _get(f"http://{server.metrics_address}/metrics")
        assert _get(f"http://{server.metrics_address}/healthz") == (200, "ok\n")
        assert _get(f"http://{server.metrics_address}/else")[0] == 404
    assert status == 200
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    calls = {each.labels["method"]: each for each in samples if each.name == "phalanx_rpc_calls_total"}
    assert {name: calls[kit.method(name)].labels["code"] for name in ("Say", "Count", "Do")} == {
        "Say": "OK",
        "Count": "OK",
        "Do": "NOT_FOUND",
    }
    assert any(each.name == "phalanx_rpc_call_seconds_bucket" for each in samples)


def test_metrics_of_two_servers_of_a_process_are_apart() -> None:
    first, second = Metrics(), Metrics()
    first.calls.streams.set(3)
    assert second.registry.get_sample_value("phalanx_rpc_open_streams") == 0


def test_metrics_port_in_use_is_one_clear_line_and_a_sick_process_says_so() -> None:
    with MetricsServer(Metrics(), "127.0.0.1:0", lambda: False) as server:
        assert _get(f"http://{server.address}/healthz") == (503, "not serving\n")
        with pytest.raises(PhalanxError, match="expected a free port"):
            MetricsServer(Metrics(), server.address)


def test_spans_of_caller_and_service_belong_to_one_trace(cluster: Cluster) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("test")
    inside: list[int] = []

    def say(request: Any, context: grpc.ServicerContext) -> Any:
        inside.append(trace.get_current_span().get_span_context().trace_id)
        return request

    with (
        kit.serve_echo(cluster, kit.Echo(Say=say), tracer=tracer) as server,
        kit.call_echo(cluster, server, tracer=tracer) as channel,
        tracer.start_as_current_span("outer") as outer,
    ):
        kit.stub(channel).Say(kit.pb.Words())
        list(kit.stub(channel).Count(kit.pb.Cursor()))
    found = {(span.name, span.kind): span for span in spans.get_finished_spans()}
    for name in ("Say", "Count"):
        full = kit.method(name).lstrip("/")
        client, server_span = found[full, trace.SpanKind.CLIENT], found[full, trace.SpanKind.SERVER]
        assert server_span.parent is not None
        assert server_span.parent.span_id == client.context.span_id
        assert client.context.trace_id == outer.get_span_context().trace_id
    assert inside == [outer.get_span_context().trace_id]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """The monitor's receiver, as far as tracing needs it."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.got = threading.Event()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.requests.append(request)
        self.got.set()
        return trace_service_pb2.ExportTraceServiceResponse()


def test_traces_reach_the_monitor_over_mtls_and_make_no_traces_of_their_own(cluster: Cluster) -> None:
    collector = Collector()
    method = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    config = cluster.service("monitor")
    with serve(config, [lambda server: add(collector, server)], {method: AGENTS | SERVICES}) as first:
        own = start_tracing("monitor", first.address, config.security.credentials)
        with serve(
            cluster.service("monitor2"),
            [lambda server: add(collector, server)],
            {method: AGENTS | SERVICES},
            tracer=own.tracer,
        ) as monitor:
            tracing = start_tracing("train", monitor.address, cluster.credentials(Role.AGENT))
            with tracing.tracer.start_as_current_span("step"):
                pass
            assert tracing.flush(20)
            assert collector.got.wait(20)
            tracing.stop()
            own.stop()
    (request,) = collector.requests
    (resource,) = request.resource_spans
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["step"]
    assert {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"] == (
        "phalanx-train"
    )


def test_traces_for_a_dead_monitor_never_hold_anyone_up(cluster: Cluster) -> None:
    tracing = start_tracing("train", "127.0.0.1:1", cluster.credentials())
    began_s = time.monotonic()
    for _ in range(5000):
        tracing.tracer.start_span("step").end()
    tracing.stop()
    assert time.monotonic() - began_s < EXPORT_S + 5


def test_traces_without_a_monitor_are_off() -> None:
    tracing = start_tracing("train")
    with tracing.tracer.start_as_current_span("step") as span:
        assert not span.is_recording()
    assert tracing.flush(1)
    tracing.stop()
