"""What was sent by OpenTelemetry, in a bounded space: the last value of every series, and rings of spans and logs, by
job. It is for people who look at a run now; whoever keeps telemetry for long has a back end of their own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

MAX_JOBS, MAX_SERIES, MAX_SPANS, MAX_LOGS = 200, 5000, 2000, 2000
MAX_TEXT, MAX_LABELS = 2000, 32
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Point:
    """The last value of a series. num: values so far. time_ns: by the sender's clock."""

    name: str
    labels: Labels
    value: float
    time_ns: int
    num: int = 1


@dataclass(frozen=True, slots=True)
class Span:
    """One span that ended. trace_id, span_id, parent_id: hexadecimal; parent_id "" for a root."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    duration_ns: int
    is_error: bool


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line, cut to `MAX_TEXT`. severity: as the sender names it."""

    service: str
    severity: str
    text: str
    time_ns: int
    trace_id: str


@dataclass(slots=True)
class _Job:
    points: dict[tuple[str, Labels], Point] = field(default_factory=dict)
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    logs: deque[LogLine] = field(default_factory=lambda: deque(maxlen=MAX_LOGS))


class Telemetry:
    """Safe for several threads. A job above `MAX_JOBS` takes the place of the one that sent nothing for longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self.num_points = self.num_spans = self.num_logs = self.num_rejected = 0

    def add_points(self, job: str, points: Iterable[Point]) -> int:
        """Takes values; the number of those refused, as the job has `MAX_SERIES` series already."""
        refused = 0
        with self._lock:
            held = self._job(job).points
            for point in points:
                key = (point.name, point.labels)
                before = held.get(key)
                if before is None and len(held) >= MAX_SERIES:
                    refused += 1
                    continue
                num = 1 if before is None else before.num + 1
                held[key] = Point(point.name, point.labels, point.value, point.time_ns, num)
                self.num_points += 1
            self.num_rejected += refused
        return refused

    def add_spans(self, job: str, spans: Sequence[Span]) -> None:
        """Takes spans; the oldest leave."""
        with self._lock:
            self._job(job).spans.extend(spans)
            self.num_spans += len(spans)

    def add_logs(self, job: str, lines: Sequence[LogLine]) -> None:
        """Takes lines; the oldest leave."""
        with self._lock:
            self._job(job).logs.extend(lines)
            self.num_logs += len(lines)

    def reject(self, number: int) -> None:
        """Counts what was not taken."""
        with self._lock:
            self.num_rejected += number

    def jobs(self) -> tuple[str, ...]:
        """The jobs that sent something; "" for what belongs to none."""
        with self._lock:
            return tuple(self._jobs)

    def points(self, job: str) -> tuple[Point, ...]:
        """The last value of every series of a job."""
        with self._lock:
            return tuple(self._jobs[job].points.values()) if job in self._jobs else ()

    def spans(self, job: str) -> tuple[Span, ...]:
        """The newest spans of a job, oldest first."""
        with self._lock:
            return tuple(self._jobs[job].spans) if job in self._jobs else ()

    def logs(self, job: str) -> tuple[LogLine, ...]:
        """The newest lines of a job, oldest first."""
        with self._lock:
            return tuple(self._jobs[job].logs) if job in self._jobs else ()

    def counters(self) -> dict[str, tuple[str, Callable[[], float]]]:
        """How much came, for Prometheus."""
        return {
            "phalanx_monitor_otlp_points": ("Values received by OTLP", lambda: float(self.num_points)),
            "phalanx_monitor_otlp_spans": ("Spans received by OTLP", lambda: float(self.num_spans)),
            "phalanx_monitor_otlp_logs": ("Log records received by OTLP", lambda: float(self.num_logs)),
            "phalanx_monitor_otlp_rejected": ("Items received by OTLP and refused", lambda: float(self.num_rejected)),
        }

    def _job(self, job: str) -> _Job:
        if job not in self._jobs:
            if len(self._jobs) >= MAX_JOBS:
                self._jobs.popitem(last=False)
            self._jobs[job] = _Job()
        self._jobs.move_to_end(job)
        return self._jobs[job]
