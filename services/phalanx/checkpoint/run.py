"""The checkpoint service put together from its configuration, and run until it is told to end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from phalanx.api.checkpoint.v1.checkpoint_service_pb2_grpc import add_CheckpointServiceServicer_to_server
from phalanx.checkpoint.access import ACCESS
from phalanx.checkpoint.catalog import LEASE_EXPIRY_S, Catalog, Outlooks
from phalanx.checkpoint.collection import GRACE_S, Report
from phalanx.checkpoint.commits import MAX_COMMITS, Commits
from phalanx.checkpoint.curator import INTERVAL_S, Curator
from phalanx.checkpoint.holds import Holds
from phalanx.checkpoint.jobs import Jobs
from phalanx.checkpoint.pins import PinLog
from phalanx.checkpoint.server import CheckpointServicer
from phalanx.checkpoint.store import Database as Store
from phalanx.checkpoint.verifying import MAX_AT_ONCE, Verifier
from phalanx.core.errors import PhalanxError
from phalanx.lineage.registry import Registry
from phalanx.objects import open_store
from phalanx.rpc import Database, Metrics, Server, ServiceConfig, serve
from phalanx.rpc.tracing import start_tracing

DEFAULT_DATABASE = "checkpoint.sqlite"


@dataclass(frozen=True, slots=True)
class Options:
    """`[options]` of the service. grace_s: how long an object must have been seen unreferenced before it goes.
    interval_s: between collections of all jobs. lease_expiry_s: how long a lease holds of which nothing changes.
    max_commits: that wait or work at once. max_verifications: at once.
    """

    grace_s: float = GRACE_S
    interval_s: float = INTERVAL_S
    lease_expiry_s: float = LEASE_EXPIRY_S
    max_commits: int = MAX_COMMITS
    max_verifications: int = MAX_AT_ONCE


class _Figures:
    """What people watch beside the calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._passes = Counter("phalanx_checkpoint_collections", "Passes over a job", ["outcome"], registry=registry)
        self._objects = Counter("phalanx_checkpoint_removed_objects", "Objects removed", registry=registry)
        self._bytes = Counter("phalanx_checkpoint_removed_bytes", "Bytes removed", registry=registry)
        self.in_flight = Gauge("phalanx_checkpoint_commits_in_flight", "Commits under way", registry=registry)

    def on_report(self, report: Report) -> None:
        """A pass ended."""
        self._passes.labels("complete" if report.is_complete else "cut_short").inc()
        for removal in report.removals:
            if removal.removed:
                self._objects.inc(removal.num_objects)
                self._bytes.inc(removal.num_bytes)

    def on_failure(self) -> None:
        """A pass failed."""
        self._passes.labels("failed").inc()


@contextmanager
def running(config: ServiceConfig) -> Iterator[Server]:
    """The service, serving and collecting; ended on leaving. Raises PhalanxError for a configuration that can't work,
    OutsideError where the database fails.
    """
    options = config.option_table(Options)
    if not config.storage:
        raise PhalanxError(
            "storage", expected="URL of the cluster's root in the service's file", remedy="run `phalanx up`"
        )
    root = open_store(config.storage, config.storage_settings)
    metrics, holds = Metrics(), Holds()
    figures = _Figures(metrics.registry)
    database = Store((config.database or Database(f"sqlite:///{DEFAULT_DATABASE}")).secret_url(), root.url)
    tracing = start_tracing(config.name, config.services.get("monitor", ""), config.security.credentials)
    try:
        jobs, pins = Jobs(Registry(root)), PinLog(root)
        commits = Commits(database, holds, options.max_commits)
        figures.in_flight.set_function(lambda: commits.num_in_flight)
        outlooks = Outlooks(jobs, pins, database, holds, options.lease_expiry_s)
        catalog = Catalog(outlooks, database)
        curator = Curator(
            jobs,
            catalog,
            outlooks,
            pins,
            database,
            holds,
            grace_s=options.grace_s,
            on_report=figures.on_report,
            on_failure=figures.on_failure,
        )
        servicer = CheckpointServicer(jobs, commits, catalog, curator, Verifier(holds, options.max_verifications))
        adder = lambda server: add_CheckpointServiceServicer_to_server(servicer, server)  # noqa: E731
        with serve(config, [adder], ACCESS, metrics=metrics, tracer=tracing.tracer) as server:
            collecting = threading.Thread(target=curator.run, args=(options.interval_s,), name="collect", daemon=True)
            collecting.start()
            try:
                yield server
            finally:
                curator.stop()
                collecting.join(STOP_S)
    finally:
        tracing.stop()
        database.close()


STOP_S = 5.0
