"""Telemetry: names of metrics and phases, a queue that never slows a step, and the sinks behind it."""

from phalanx.telemetry.metrics import Metrics
from phalanx.telemetry.names import Metric, Phase
from phalanx.telemetry.queue import Counts, SinkQueue
from phalanx.telemetry.sink import Sink, Values

__all__ = ["Counts", "Metric", "Metrics", "Phase", "Sink", "SinkQueue", "Values"]
