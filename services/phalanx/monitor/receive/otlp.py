"""The Export services of OpenTelemetry: traces, metrics and logs, as any SDK or collector sends them.

A resource names its job by the attribute `phalanx.job` (`projects/<p>/jobs/<uid>`); without one it belongs to none.
What lies outside the scope of the sender's token, or finds no room, is refused by partial success, and the rest taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs_pb
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceServicer
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceServicer
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from phalanx.core.errors import PhalanxError
from phalanx.monitor.access import may_see
from phalanx.monitor.receive.telemetry import MAX_LABELS, MAX_TEXT, Labels, LogLine, Point, Span, Telemetry
from phalanx.rpc import Caller, caller

JOB: Final = "phalanx.job"
_SERVICE: Final = "service.name"
_NO_ROOM: Final = "the job has as many series as are kept"
_NO_SCOPE: Final = "the token's scope does not hold the job of the resource"


class TraceReceiver(TraceServiceServicer):
    """`opentelemetry.proto.collector.trace.v1.TraceService`."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def Export(  # noqa: N802 - the contract's name
        self, request: trace_pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_pb.ExportTraceServiceResponse:
        answer, who = trace_pb.ExportTraceServiceResponse(), caller(context)
        for each in request.resource_spans:
            job, service = _owner(each.resource)
            spans = [_span(service, span) for scope in each.scope_spans for span in scope.spans]
            if _may_send(who, job):
                self._telemetry.add_spans(job, spans)
            else:
                self._telemetry.reject(len(spans))
                answer.partial_success.rejected_spans += len(spans)
                answer.partial_success.error_message = _NO_SCOPE
        return answer


class MetricsReceiver(MetricsServiceServicer):
    """`opentelemetry.proto.collector.metrics.v1.MetricsService`."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def Export(  # noqa: N802 - the contract's name
        self, request: metrics_pb.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_pb.ExportMetricsServiceResponse:
        answer, who = metrics_pb.ExportMetricsServiceResponse(), caller(context)
        for each in request.resource_metrics:
            job, _ = _owner(each.resource)
            points = [at for scope in each.scope_metrics for metric in scope.metrics for at in _points(metric)]
            if _may_send(who, job):
                refused, why = self._telemetry.add_points(job, points), _NO_ROOM
            else:
                refused, why = len(points), _NO_SCOPE
                self._telemetry.reject(refused)
            if refused:
                answer.partial_success.rejected_data_points += refused
                answer.partial_success.error_message = why
        return answer


class LogsReceiver(LogsServiceServicer):
    """`opentelemetry.proto.collector.logs.v1.LogsService`."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def Export(  # noqa: N802 - the contract's name
        self, request: logs_pb.ExportLogsServiceRequest, context: grpc.ServicerContext
    ) -> logs_pb.ExportLogsServiceResponse:
        answer, who = logs_pb.ExportLogsServiceResponse(), caller(context)
        for each in request.resource_logs:
            job, service = _owner(each.resource)
            lines = [
                LogLine(
                    service[:MAX_TEXT],
                    record.severity_text[:MAX_TEXT],
                    _text(record.body),
                    record.time_unix_nano or record.observed_time_unix_nano,
                    record.trace_id.hex(),
                )
                for scope in each.scope_logs
                for record in scope.log_records
            ]
            if _may_send(who, job):
                self._telemetry.add_logs(job, lines)
            else:
                self._telemetry.reject(len(lines))
                answer.partial_success.rejected_log_records += len(lines)
                answer.partial_success.error_message = _NO_SCOPE
        return answer


def _owner(resource: Resource) -> tuple[str, str]:
    """The job and the service that a resource names."""
    named = {each.key: each.value.string_value for each in resource.attributes}
    return named.get(JOB, ""), named.get(_SERVICE, "")


def _may_send(who: Caller, job: str) -> bool:
    try:
        return may_see(who, job)
    except PhalanxError:  # no job's name
        return False


def _points(metric: Metric) -> Iterator[Point]:
    """The values of a metric; of a histogram or summary its sum and its count."""
    kind = metric.WhichOneof("data")
    if kind in ("gauge", "sum"):
        for at in getattr(metric, kind).data_points:
            value = float(at.as_int) if at.WhichOneof("value") == "as_int" else at.as_double
            yield Point(metric.name[:MAX_TEXT], _labels(at.attributes), value, at.time_unix_nano)
    elif kind is not None:
        for at in getattr(metric, kind).data_points:
            labels = _labels(at.attributes)
            yield Point(f"{metric.name[:MAX_TEXT]}.count", labels, float(at.count), at.time_unix_nano)
            yield Point(f"{metric.name[:MAX_TEXT]}.sum", labels, at.sum, at.time_unix_nano)


def _span(service: str, span: SpanMessage) -> Span:
    return Span(
        service[:MAX_TEXT],
        span.name[:MAX_TEXT],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        max(0, span.end_time_unix_nano - span.start_time_unix_nano),
        span.status.code == Status.STATUS_CODE_ERROR,
    )


def _labels(attributes: Iterable[KeyValue]) -> Labels:
    return tuple(sorted((each.key[:MAX_TEXT], _text(each.value)) for each in list(attributes)[:MAX_LABELS]))


def _text(value: AnyValue) -> str:
    kind = value.WhichOneof("value")
    if kind is None:
        return ""
    text = getattr(value, kind)
    return str(text if kind in ("string_value", "int_value", "double_value", "bool_value") else value)[:MAX_TEXT]
