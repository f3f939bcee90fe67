"""A run's figures to the monitor, or to any receiver of OpenTelemetry: one export of gauges a row.

Lossy by design: it is a copy for people. The receiver may be stopped, restarted or away for as long as it likes: the
queue in front holds what fits it, counts what does not, and goes on when the receiver is back. A row whose export ran
into the deadline may have arrived and be sent again: the receiver keeps last values, so that changes nothing.

One sink serves one attempt of a job: a later attempt that does a step again is another sink behind another queue.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from phalanx.core.errors import OutsideError
from phalanx.rpc.config import Credentials
from phalanx.rpc.tracing import exporter_credentials
from phalanx.telemetry.sink import Values

STEP: Final = "train/step"
EXPORT_DEADLINE_S: Final = 3.0
_CHANNEL: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", int(EXPORT_DEADLINE_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(EXPORT_DEADLINE_S * 1000)),
)


class OtlpMetrics:
    """Sends over mTLS with a token to the receiver at host:port.

    job: `projects/<p>/jobs/<uid>`. node: where the rank runs, "" for unknown. deadline_s: of one export.
    """

    name = "otlp"
    longest_pause_s = 5.0

    def __init__(
        self,
        endpoint: str,
        credentials: Credentials,
        job: str,
        attempt: int,
        *,
        node: str = "",
        deadline_s: float = EXPORT_DEADLINE_S,
    ) -> None:
        self._endpoint, self._credentials, self._deadline_s = endpoint, credentials, deadline_s
        self._resource = Resource(
            {"service.name": "phalanx-rank", "phalanx.job": job, "phalanx.attempt": attempt, "phalanx.node": node}
        )
        self._scope = InstrumentationScope("phalanx.telemetry")
        self._exporter: OTLPMetricExporter | None = None

    def open(self, run_id: str, config: Mapping[str, Any]) -> int:
        self._exporter = OTLPMetricExporter(
            endpoint=self._endpoint,
            credentials=exporter_credentials(self._credentials),
            insecure=False,
            timeout=self._deadline_s,
            channel_options=_CHANNEL,  # type: ignore[arg-type]  # it says one option, and takes any number
        )
        return -1

    def log(self, step: int, values: Values) -> None:
        """Raises OutsideError unless the receiver takes the row within the deadline."""
        assert self._exporter is not None
        if self._exporter.export(self._data({**values, STEP: float(step)})) is not MetricExportResult.SUCCESS:
            raise OutsideError(f"{self._endpoint} does not take figures within {self._deadline_s:g} s")

    def flush(self) -> None:
        """Nothing waits here: a row is sent when it is logged."""

    def close(self) -> None:
        assert self._exporter is not None
        self._exporter.shutdown()

    def _data(self, values: Values) -> MetricsData:
        now_ns = time.time_ns()
        metrics = [
            Metric(name, None, None, Gauge([NumberDataPoint({}, 0, now_ns, value)])) for name, value in values.items()
        ]
        return MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(self._scope, metrics, "")], "")])
