"""The agent's own figures, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge


def add_figures(
    registry: CollectorRegistry,
    *,
    is_connected: Callable[[], bool],
    num_ranks: Callable[[], int],
    num_slots: int,
    num_dropped: Callable[[], int],
) -> None:
    """What is asked at each scrape."""
    connected = Gauge("phalanx_agent_connected", "Whether the stream to train is open", registry=registry)
    connected.set_function(lambda: float(is_connected()))
    ranks = Gauge("phalanx_agent_ranks", "Ranks that live on this node", registry=registry)
    ranks.set_function(lambda: float(num_ranks()))
    Gauge("phalanx_agent_slots", "Ranks that may live on this node", registry=registry).set(num_slots)
    dropped = Gauge(
        "phalanx_agent_dropped_records", "Progress records dropped since the agent started", registry=registry
    )
    dropped.set_function(lambda: float(num_dropped()))
