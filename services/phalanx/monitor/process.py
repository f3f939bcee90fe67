"""The parts of the service put together: made, started and ended in this order.

Reading storage goes first, so that what is old is not told as news; then train is heard, incidents are reported, GPUs
are scraped, calls are served. Ended in the opposite order, with a last save.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from phalanx.api.monitor.v1.monitor_service_pb2_grpc import add_MonitorServiceServicer_to_server
from phalanx.api.train.v1.train_service_pb2 import WatchRecordsResponse
from phalanx.api.train.v1.train_service_pb2_grpc import TrainServiceStub
from phalanx.checkpoint.client import CheckpointClient
from phalanx.core.errors import PhalanxError
from phalanx.lineage.registry import Registry
from phalanx.monitor.access import ACCESS
from phalanx.monitor.alerts import Alerts, Webhook
from phalanx.monitor.attention import AttentiveClock
from phalanx.monitor.board import Board
from phalanx.monitor.gpus import GpuBoard
from phalanx.monitor.judge import Judge
from phalanx.monitor.metrics import MonitorCollector
from phalanx.monitor.options import Options
from phalanx.monitor.receive.otlp import LogsReceiver, MetricsReceiver, TraceReceiver
from phalanx.monitor.receive.sources import start_sources
from phalanx.monitor.receive.telemetry import Telemetry
from phalanx.monitor.refill import Refill
from phalanx.monitor.reporter import Reporter
from phalanx.monitor.rules.gpu import GpuFault
from phalanx.monitor.rules.verdict import Kind, Verdict
from phalanx.monitor.server import MonitorServicer
from phalanx.monitor.stocktaking import Stocktaking
from phalanx.monitor.store import MonitorStore
from phalanx.monitor.view import View
from phalanx.monitor.watch import Watch
from phalanx.monitor.web.gateway import Page
from phalanx.objects import open_store
from phalanx.rpc import Metrics, Server, ServiceConfig, connect_service, serve

LOG = logging.getLogger(__name__)
Adder: TypeAlias = Callable[[object, grpc.Server], None]  # OpenTelemetry's own are not typed
FIRST_FILL_S = 10.0
STREAM_DEADLINE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Running:
    """The started service. page: its address, "" without one."""

    server: Server
    board: Board
    telemetry: Telemetry
    page: str


class Saver:
    """A thread that saves the board every `every_s`, at once when there is an incident, and a last time at the end."""

    def __init__(self, board: Board, every_s: float, max_runs: int) -> None:
        self._board, self._every_s, self._max_runs = board, every_s, max_runs
        self.reporter: Reporter | None = None
        self.num_failures = 0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._board.prune(self._max_runs)
        self._thread.start()

    def wake(self) -> None:
        """There is an incident."""
        self._wake.set()

    def save(self) -> None:
        """Saves now; whoever reports is woken where there is something to report. Raises what the store raises."""
        if self._board.save() and self.reporter is not None:
            self.reporter.wake()

    def close(self) -> None:
        """Saves and ends."""
        self._stop.set()
        self._wake.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self._every_s)
            self._wake.clear()
            try:
                self.save()
            except Exception:
                self.num_failures += 1
                LOG.exception("what was measured is not saved; it is tried again")
                self._stop.wait(self._every_s)


@contextmanager
def running(config: ServiceConfig) -> Iterator[Running]:
    """The service, started, until the block is left. Raises PhalanxError for what the user must change."""
    options = config.option_table(Options)
    with ExitStack() as ending:
        store = MonitorStore(_database_url(config))
        ending.callback(store.close)
        clock = AttentiveClock()
        board = Board(store, clock, lambda: saver.wake())
        saver = Saver(board, options.save_every_s, options.max_runs)
        gpus = GpuBoard(store, lambda fault: note_fault(board, saver, fault))
        view, telemetry = View(board, gpus, store), Telemetry()
        alerts = Alerts(Webhook.read(options.webhook) if options.webhook else None)
        counts = {
            "phalanx_monitor_records_missed": ("Records known to be missed", lambda: float(board.num_missed)),
            "phalanx_monitor_webhook_posts": ("Incidents that the webhook took", lambda: float(alerts.num_posted)),
            "phalanx_monitor_webhook_failures": ("Incidents that it did not", lambda: float(alerts.num_failed)),
            "phalanx_monitor_save_failures": ("Saves that failed", lambda: float(saver.num_failures)),
            **telemetry.counters(),
        }
        metrics = Metrics()
        metrics.registry.register(MonitorCollector(board, gpus, counts))
        saver.start()
        ending.callback(saver.close)
        saver.reporter = _listen(config, store, board, alerts, ending)
        ending.enter_context(start_sources(options, gpus))
        server = ending.enter_context(_serve(config, view, telemetry, metrics))
        page = _page(options, view, ending)
        yield Running(server, board, telemetry, page)


def note_fault(board: Board, saver: Saver, fault: GpuFault) -> None:
    """A GPU's fault concerns every job with a rank on its node; without one it is an incident of no job. It is saved
    when this returns.
    """
    for job in board.jobs_on(fault.node) or [""]:
        attempt = board.attempt_of(job) if job else 0
        board.add_verdict(job, Verdict(Kind.GPU_FAULT, attempt, 0, 0, fault.message, 0, None, fault.node, fault.key))
    saver.save()


def _listen(config: ServiceConfig, store: MonitorStore, board: Board, alerts: Alerts, ending: ExitStack) -> Reporter:
    """Storage, then train, then those who are told."""
    registry = Registry(open_store(config.storage, config.storage_settings)) if config.storage else None
    refill = Refill(board, registry)
    refill.start()
    ending.callback(refill.close)
    if not refill.first_done.wait(FIRST_FILL_S):
        LOG.warning("storage is slow; going on while it is read")
    train = None
    if "train" in config.services:
        channel = connect_service(
            config, "train", idempotent=("ReportIncident", "ListNodes"), stream_deadline_s=STREAM_DEADLINE_S
        )
        ending.callback(channel.close)
        train = TrainServiceStub(channel)
    reporter = Reporter(store, train, alerts, board.put_incident)
    reporter.start()
    ending.callback(reporter.close)
    if train is not None:
        stock = _stocktaking(config, board, ending)

        def on_told(told: WatchRecordsResponse) -> None:
            refill.on_told(told)
            if stock is not None:
                stock.on_told(told)

        watch = Watch(train, board, refill.on_missed, on_told)
        judge = Judge(board, train, lambda: watch.is_listening)
        for part in (watch, judge):
            part.start()
            ending.callback(part.close)
    return reporter


def _stocktaking(config: ServiceConfig, board: Board, ending: ExitStack) -> Stocktaking | None:
    """Started; None where there is no checkpoint service."""
    if "checkpoint" not in config.services:
        return None
    client = CheckpointClient(connect_service(config, "checkpoint", idempotent=("ListCheckpoints",)))
    ending.callback(client.close)
    stock = Stocktaking(board, client)
    stock.start()
    ending.callback(stock.close)
    return stock


def _serve(config: ServiceConfig, view: View, telemetry: Telemetry, metrics: Metrics) -> Server:
    def add(server: grpc.Server) -> None:
        add_MonitorServiceServicer_to_server(MonitorServicer(view), server)
        add_traces: Adder = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add_metrics: Adder = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
        add_logs: Adder = logs_service_pb2_grpc.add_LogsServiceServicer_to_server
        add_traces(TraceReceiver(telemetry), server)
        add_metrics(MetricsReceiver(telemetry), server)
        add_logs(LogsReceiver(telemetry), server)

    return serve(
        config,
        [add],
        ACCESS,
        metrics=metrics,
    )


def _page(options: Options, view: View, ending: ExitStack) -> str:
    if not options.page:
        return ""
    page = Page(view, options.page, options.page_password)
    ending.callback(page.close)
    return page.address


def _database_url(config: ServiceConfig) -> str:
    if config.database is None:
        raise PhalanxError(
            f"{config.name}: database", expected="where measurements are kept", remedy="add the table [database]"
        )
    return config.database.secret_url()
