"""Where the figures of rank 0 go beside train: the job's own sinks, and the monitor by OTLP. Lossy; slows nobody."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from phalanx.agent.facts import JobFacts
from phalanx.agent.gangs import GangKey
from phalanx.gang import Event
from phalanx.rpc.config import Credentials
from phalanx.telemetry.otlp import OtlpMetrics
from phalanx.telemetry.sink import Sink
from phalanx.trainer.figures import Figures

CLOSE_DEADLINE_S = 10.0
LOG = logging.getLogger(__name__)


class Exports:
    """The sinks of every gang whose rank 0 lives here. Safe from any thread.

    monitor: the sink that carries a gang's figures to the monitor, None where there is none.
    """

    def __init__(self, monitor: Callable[[GangKey], Sink] | None = None) -> None:
        self._monitor = monitor
        self._open: dict[GangKey, Figures] = {}
        self._closing: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()

    def open(self, key: GangKey, facts: JobFacts) -> None:
        """Opens the sinks of a gang. Raises PhalanxError where one that the job wants lacks its library."""
        if facts.job is None:
            return
        with self._lock:
            earlier = self._closing.pop(key.job, None)
        if earlier is not None:  # of the attempt before, into the same files
            earlier.join(CLOSE_DEADLINE_S)
        figures = Figures(facts.job, [self._monitor(key)] if self._monitor is not None else [])
        with self._lock:
            self._open[key] = figures

    def observe(self, key: GangKey, event: Event) -> None:
        """Takes an event of a rank; those of rank 0 count."""
        figures = self._open.get(key)
        if figures is not None and event.rank == 0:
            figures.observe(event.kind, event.fields)

    def close(self, key: GangKey) -> None:
        """The gang is gone; what waits is written in a thread."""
        with self._lock:
            figures = self._open.pop(key, None)
            if figures is None:
                return
            thread = threading.Thread(target=figures.close, name="figures", daemon=True)
            thread.start()
            self._closing[key.job] = thread

    def finish(self) -> None:
        """Waits for what is being written, for a while."""
        with self._lock:
            closing = list(self._closing.values())
        for thread in closing:
            thread.join(CLOSE_DEADLINE_S)


def to_monitor(endpoint: str, credentials: Credentials, node: str) -> Callable[[GangKey], Sink]:
    """Makes sinks that send to the monitor at host:port."""
    return lambda key: OtlpMetrics(endpoint, credentials, key.job, key.attempt, node=node)
