"""OpenTelemetry from the SDK's own exporters, over mTLS with a token; and figures of ranks through the sink's queue."""

from __future__ import annotations

import signal
import statistics
import time

import grpc
import pytest
from monitor_kit import wait_until
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from phalanx.monitor.process import running
from phalanx.rpc import Database, Role
from phalanx.rpc.tracing import exporter_credentials
from phalanx.telemetry import SinkQueue
from phalanx.telemetry.otlp import STEP, OtlpMetrics

JOB = "projects/p/jobs/run-1"
RESOURCE = Resource({"service.name": "phalanx-rank", "phalanx.job": JOB})


@pytest.fixture
def service(cluster, tmp_path):
    config = cluster.service("monitor", database=Database(f"sqlite:///{tmp_path}/m.sqlite"), options={"nvml": False})
    with running(config) as service:
        yield service


@pytest.fixture
def exporter_of(service, cluster):
    def make(kind, role=Role.AGENT, **scope):
        credentials = exporter_credentials(cluster.credentials(role, **scope))
        return kind(endpoint=service.server.address, credentials=credentials, insecure=False, timeout=5)

    return make


def test_otlp_metrics_of_the_sdk_are_kept_as_last_values(service, exporter_of):
    reader = PeriodicExportingMetricReader(exporter_of(OTLPMetricExporter), export_interval_millis=1e9)
    meter = MeterProvider([reader], resource=RESOURCE).get_meter("test")
    counter, gauge, histogram = (
        meter.create_counter("steps"),
        meter.create_gauge("loss"),
        meter.create_histogram("seconds"),
    )
    for loss in (3.0, 2.5):
        counter.add(1, {"rank": 0})
        gauge.set(loss)
        histogram.record(0.5)
        reader.force_flush()
    found = {(point.name, point.labels): (point.value, point.num) for point in service.telemetry.points(JOB)}
    assert found[("steps", (("rank", "0"),))] == (2.0, 2)
    assert found[("loss", ())] == (2.5, 2)
    assert found[("seconds.count", ())][0] == 2 and found[("seconds.sum", ())][0] == 1.0


def test_otlp_spans_of_the_sdk_are_kept_in_a_ring(service, exporter_of, monkeypatch):
    monkeypatch.setattr("phalanx.monitor.receive.telemetry.MAX_SPANS", 5)
    provider = TracerProvider(resource=RESOURCE)
    provider.add_span_processor(SimpleSpanProcessor(exporter_of(OTLPSpanExporter)))
    tracer = provider.get_tracer("test")
    for number in range(8):
        with tracer.start_as_current_span(f"step {number}"):
            pass
    spans = service.telemetry.spans(JOB)
    assert service.telemetry.num_spans == 8
    assert spans[-1].name == "step 7" and len(spans[-1].trace_id) == 32 and spans[-1].service == "phalanx-rank"


def test_otlp_logs_of_the_sdk_are_kept(service, exporter_of):
    provider = LoggerProvider(resource=RESOURCE)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter_of(OTLPLogExporter)))
    record = LogRecord(
        timestamp=1, severity_text="WARN", severity_number=SeverityNumber.WARN, body="shard 7 is damaged"
    )
    provider.get_logger("test").emit(record)
    (line,) = service.telemetry.logs(JOB)
    assert (line.text, line.severity, line.service) == ("shard 7 is damaged", "WARN", "phalanx-rank")


def test_otlp_above_the_bound_of_series_is_refused_in_part_and_counted(service, exporter_of, monkeypatch):
    monkeypatch.setattr("phalanx.monitor.receive.telemetry.MAX_SERIES", 3)
    reader = PeriodicExportingMetricReader(exporter_of(OTLPMetricExporter), export_interval_millis=1e9)
    counter = MeterProvider([reader], resource=RESOURCE).get_meter("test").create_counter("steps")
    for rank in range(10):
        counter.add(1, {"rank": rank})
    reader.force_flush()
    assert len(service.telemetry.points(JOB)) == 3 and service.telemetry.num_rejected == 7


def test_otlp_outside_of_the_tokens_scope_is_refused(service, exporter_of):
    scopes = ({"project": "p", "job": "run-2"}, {"project": "q"}, {"project": "p", "job": "run-1"})
    for scope in scopes:
        provider = TracerProvider(resource=RESOURCE)
        provider.add_span_processor(SimpleSpanProcessor(exporter_of(OTLPSpanExporter, **scope)))
        provider.get_tracer("test").start_span("one").end()
    assert service.telemetry.num_rejected == 2 and len(service.telemetry.spans(JOB)) == 1


def test_otlp_without_a_token_or_of_a_viewer_is_refused(service, cluster, exporter_of):
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    from phalanx.rpc.credentials import channel_credentials

    credentials = cluster.credentials()
    with grpc.secure_channel(service.server.address, channel_credentials(credentials)) as channel:
        stub = trace_service_pb2_grpc.TraceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as error:
            stub.Export(trace_service_pb2.ExportTraceServiceRequest(), timeout=5)
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
    provider = TracerProvider(resource=RESOURCE)
    provider.add_span_processor(SimpleSpanProcessor(exporter_of(OTLPSpanExporter, Role.VIEWER)))
    provider.get_tracer("test").start_span("one").end()
    assert service.telemetry.spans(JOB) == ()


def test_otlp_jobs_are_bounded_and_the_one_silent_for_longest_leaves(monkeypatch):
    from phalanx.monitor.receive.telemetry import LogLine, Telemetry

    monkeypatch.setattr("phalanx.monitor.receive.telemetry.MAX_JOBS", 2)
    telemetry = Telemetry()
    for job in ("a", "b", "a", "c"):
        telemetry.add_logs(job, [LogLine("", "", job, 0, "")])
    assert telemetry.jobs() == ("a", "c") and len(telemetry.logs("a")) == 2


def sink(address, cluster, deadline_s=1.0):
    return OtlpMetrics(address, cluster.credentials(Role.AGENT), JOB, 1, node="node-a", deadline_s=deadline_s)


def test_sink_rows_arrive_with_their_step(service, cluster):
    queue = SinkQueue(sink(service.server.address, cluster, 5.0), "run-1", {})
    for step in range(1, 6):
        queue.put(step, {"train/loss": 10.0 - step})
    counts = queue.close(10.0)
    assert (counts.logged, counts.dropped) == (5, 0)
    found = {point.name: (point.value, point.num) for point in service.telemetry.points(JOB)}
    assert found == {"train/loss": (5.0, 5), STEP: (5.0, 5)}


STEP_S = 0.02


def outage(monitor, cluster, away, back, away_s):
    """Rows of steps of `STEP_S` for as long as the monitor is away, and until they flow again."""
    queue = SinkQueue(sink(monitor.address, cluster), "run-1", {}, capacity=50)
    took_s, step = [], 0

    def put():
        nonlocal step
        step += 1
        began_s = time.perf_counter()
        queue.put(step, {"train/loss": 2.0, "speed/step_time_s": STEP_S})
        took_s.append(time.perf_counter() - began_s)
        counts = queue.counts
        assert counts.logged + counts.dropped + counts.waiting == step and counts.failure == ""
        time.sleep(STEP_S)  # the step itself

    while queue.counts.logged < 5:
        put()
    away()
    end_s = time.monotonic() + away_s
    while time.monotonic() < end_s:
        put()
    logged, dropped = queue.counts.logged, queue.counts.dropped
    assert dropped > 0, "more rows than fit"
    back()
    end_s = time.monotonic() + 30
    while queue.counts.logged < logged + 60:
        assert time.monotonic() < end_s, "rows don't flow again"
        put()
    before = queue.counts.dropped
    while queue.counts.waiting > 5:
        assert time.monotonic() < end_s, "the queue does not get empty"
        put()
    counts = queue.close(10.0)
    assert counts.waiting == 0 and counts.logged + counts.dropped == step and counts.dropped >= before
    assert statistics.median(took_s) < 0.01 * STEP_S, "a caller's share of a step"
    assert sum(took_s) < 0.01 * STEP_S * step + 0.02, "with one hiccup of the machine"
    return counts


def test_sink_of_a_monitor_that_is_stopped_costs_no_step_and_comes_back(make_monitor, cluster):
    monitor = make_monitor(options={"nvml": False})
    outage(monitor, cluster, lambda: monitor.signal(signal.SIGSTOP), lambda: monitor.signal(signal.SIGCONT), 4.0)
    assert "phalanx_monitor_otlp_points_total" in monitor.figures()


def test_sink_of_a_monitor_that_is_killed_costs_no_step_and_comes_back(make_monitor, cluster):
    monitor = make_monitor(options={"nvml": False})
    outage(monitor, cluster, monitor.kill, monitor.start, 3.0)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_sink_of_a_monitor_that_is_stopped_for_a_minute_costs_no_step_and_comes_back(make_monitor, cluster):
    monitor = make_monitor(options={"nvml": False})
    outage(monitor, cluster, lambda: monitor.signal(signal.SIGSTOP), lambda: monitor.signal(signal.SIGCONT), 60.0)


def test_sink_of_a_monitor_that_never_was_counts_what_it_drops_and_closes_in_time(cluster):
    queue = SinkQueue(sink("127.0.0.1:1", cluster, 0.5), "run-1", {}, capacity=10)
    for step in range(1, 101):
        queue.put(step, {"train/loss": 2.0})
    wait_until(lambda: queue.counts.dropped >= 89, "dropped")
    began_s = time.monotonic()
    counts = queue.close(5.0)
    assert time.monotonic() - began_s < 4.0
    assert (counts.logged, counts.dropped, counts.waiting) == (0, 100, 0) and counts.failure
