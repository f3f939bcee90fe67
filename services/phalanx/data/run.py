"""The data service put together from its configuration, and run until it is told to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import Counter

from phalanx.api.data.v1.data_service_pb2_grpc import add_DataServiceServicer_to_server
from phalanx.core.errors import PhalanxError
from phalanx.data.access import ACCESS
from phalanx.data.decisions import Action
from phalanx.data.jobs import Journals
from phalanx.data.plans import HorizonPolicy
from phalanx.data.reading import Reading
from phalanx.data.registered import RegisteredJobs
from phalanx.data.registration import Catalog
from phalanx.data.reports import Reports
from phalanx.data.server import DataServicer
from phalanx.data.store import CatalogStore
from phalanx.lineage.plan import HORIZON_STEPS
from phalanx.objects import open_store
from phalanx.rpc import Database, Metrics, Server, ServiceConfig, serve
from phalanx.rpc.tracing import start_tracing

DEFAULT_DATABASE = "data.sqlite"


@dataclass(frozen=True, slots=True)
class Options:
    """`[options]` of the service. horizon_steps: steps a plan reaches where the caller leaves it open."""

    horizon_steps: int = HORIZON_STEPS


@contextmanager
def running(config: ServiceConfig) -> Iterator[Server]:
    """The service, serving; ended on leaving. The database is what storage is before the first call is answered.

    Raises PhalanxError for a configuration that can't work, OutsideError where storage or the database fails.
    """
    options = config.option_table(Options)
    if not config.storage:
        raise PhalanxError(
            "storage", expected="URL of the cluster's root in the service's file", remedy="run `phalanx up`"
        )
    root = open_store(config.storage, config.storage_settings)
    metrics = Metrics()
    reports_counter = Counter("phalanx_data_damage_reports", "Damage reports", ["action"], registry=metrics.registry)

    def count(action: Action) -> None:
        reports_counter.labels(action.value).inc()

    database = CatalogStore((config.database or Database(f"sqlite:///{DEFAULT_DATABASE}")).secret_url(), root.url)
    tracing = start_tracing(config.name, config.services.get("monitor", ""), config.security.credentials)
    try:
        catalog = Catalog(root, database, config.storage_settings)
        catalog.rebuild()
        jobs, journals = RegisteredJobs(root), Journals()
        servicer = DataServicer(
            catalog, Reading(jobs, journals, HorizonPolicy(options.horizon_steps)), Reports(jobs, journals, count)
        )
        adder = lambda server: add_DataServiceServicer_to_server(servicer, server)  # noqa: E731
        with serve(config, [adder], ACCESS, metrics=metrics, tracer=tracing.tracer) as server:
            yield server
    finally:
        tracing.stop()
        database.close()
