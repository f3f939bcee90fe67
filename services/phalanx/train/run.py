"""The train service put together from its configuration, and run until it is told to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from prometheus_client import Counter, Gauge

from phalanx.api.agent.v1 import record_pb2
from phalanx.api.agent.v1.agent_service_pb2_grpc import add_AgentServiceServicer_to_server
from phalanx.api.train.v1.train_service_pb2_grpc import add_TrainServiceServicer_to_server
from phalanx.core.errors import PhalanxError
from phalanx.lineage.events import JobEvent, JobState
from phalanx.objects import open_store
from phalanx.rpc import Authority, Database, Metrics, Server, ServiceConfig, serve
from phalanx.rpc.tracing import start_tracing
from phalanx.train.access import ACCESS
from phalanx.train.agents import AgentServicer
from phalanx.train.book import KEPT_EVENTS, Book
from phalanx.train.controller import Controller
from phalanx.train.launch.agents import Agents
from phalanx.train.launch.base import GangKey
from phalanx.train.records import KEPT_RECORDS, LastSteps, RecordLog
from phalanx.train.server import TrainServicer
from phalanx.train.states import Job
from phalanx.train.store import JobStore
from phalanx.train.term import Term
from phalanx.trainer.promise import warnings_of

DEFAULT_DATABASE = "train.sqlite"


@dataclass(frozen=True, slots=True)
class Options:
    """`[options]` of the service. agent_lost_s: how long an agent may be unheard before its ranks are given up.
    kept_events: how many events of a job a watcher may be behind. kept_records: of all ranks, in memory.
    """

    agent_lost_s: float = 150.0
    kept_events: int = KEPT_EVENTS
    kept_records: int = KEPT_RECORDS


@contextmanager
def running(config: ServiceConfig, on_over: Callable[[], None] = lambda: None) -> Iterator[Server]:
    """The service, serving; ended on leaving. Jobs are what storage says before the first call is answered. on_over:
    called when a later process acts on the same storage.

    Raises PhalanxError for a configuration that can't work, OutsideError where storage or the database fails.
    """
    options = config.option_table(Options)
    if not config.storage or config.security.authority is None:
        raise PhalanxError(
            "storage" if not config.storage else "security.authority",
            expected="the cluster's root and the key that mints tokens, in the service's file",
            remedy="run `phalanx up`, which writes them",
        )
    root = open_store(config.storage, config.storage_settings)
    for warning in warnings_of(root):
        raise PhalanxError(
            "storage", value=config.storage, expected=f"create-only puts ({warning})", remedy="name other storage"
        )
    metrics = Metrics()
    records, steps = RecordLog(options.kept_records), LastSteps()
    events = Counter("phalanx_train_events", "Events of jobs", ["type"], registry=metrics.registry)

    def on_event(job: Job, event: JobEvent) -> None:
        records.add(str(job.name), event)
        events.labels(event.type.value).inc()
        controller.on_event(job, event)

    def on_records(node_id: str, key: GangKey, told: Sequence[record_pb2.Record]) -> None:
        controller.on_records(node_id, key, told)
        for record in told:
            steps.take(key.job, record)
            records.add(key.job, record)

    database = JobStore((config.database or Database(f"sqlite:///{DEFAULT_DATABASE}")).secret_url(), root.url)
    tracing = start_tracing(config.name, config.services.get("monitor", ""), config.security.credentials)
    book = Book(root, database, on_event, kept_events=options.kept_events)
    agents = Agents(
        on_records,
        lambda key: controller.is_settled(key),
        lambda key: controller.is_starting(key),
        lambda: controller.wake(),
    )
    controller = Controller(
        book,
        agents,
        Authority.load(config.security.authority),
        agent_lost_s=options.agent_lost_s,
    )
    _add_gauges(metrics, book, agents)
    try:
        book.load()
        train = TrainServicer(book, controller, agents, records, steps)
        streams = AgentServicer(agents, options.agent_lost_s)
        adders = [
            lambda server: add_TrainServiceServicer_to_server(train, server),
            lambda server: add_AgentServiceServicer_to_server(streams, server),
        ]
        with serve(config, adders, ACCESS, metrics=metrics, tracer=tracing.tracer) as server:
            controller.start(Term.claim(root).is_over, on_over)  # only once this process has the address
            yield server
    finally:
        controller.close()
        tracing.stop()
        database.close()


def _count(book: Book, state: JobState) -> float:
    return float(sum(job.state is state for job in book.jobs()))


def _add_gauges(metrics: Metrics, book: Book, agents: Agents) -> None:
    jobs = Gauge("phalanx_train_jobs", "Jobs that are known", ["state"], registry=metrics.registry)
    for state in JobState:
        jobs.labels(state.value).set_function(partial(_count, book, state))
    nodes = Gauge("phalanx_train_nodes", "Nodes whose agents are connected", registry=metrics.registry)
    nodes.set_function(lambda: sum(node.is_connected for node in agents.nodes()))
