"""An agent put together: the node, the stream to train, the socket for ranks."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from phalanx.agent import preparing, records
from phalanx.agent.access import ACCESS
from phalanx.agent.attempts import Attempts
from phalanx.agent.ending import write_end
from phalanx.agent.execute import Executor
from phalanx.agent.exports import Exports, to_monitor
from phalanx.agent.figures import add_figures
from phalanx.agent.gangs import GangKey, HeldGang
from phalanx.agent.inventory import node_id, take_inventory
from phalanx.agent.node import Item, Node
from phalanx.agent.options import Options
from phalanx.agent.outbox import Numbered
from phalanx.agent.rank_shares import RankShares
from phalanx.agent.ranks import CHECKPOINT_METHODS, DATA_METHODS, OnBehalf
from phalanx.agent.replica_keeper import ReplicaKeeper
from phalanx.agent.replica_server import ReplicaServer
from phalanx.agent.replicas import ReplicaMemory
from phalanx.agent.server import RankServer
from phalanx.agent.servers import ForkServers
from phalanx.agent.slots import Slots
from phalanx.agent.uplink import Uplink
from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1.rank_service_pb2_grpc import add_RankServiceServicer_to_server
from phalanx.core.errors import PhalanxError
from phalanx.rpc.client import connect_client, connect_service
from phalanx.rpc.config import ClientConfig, Credentials, ServiceConfig
from phalanx.rpc.metrics import Metrics, MetricsServer
from phalanx.rpc.unix import MAX_PATH_BYTES, serve_unix
from phalanx.telemetry.sink import Sink
from phalanx.trainer.local import ENTRY, PRELOAD

DIGEST_DEADLINE_S = 120.0
FLUSH_DEADLINE_S = 5.0
LOG = logging.getLogger(__name__)
OWN_PRELOAD = ("phalanx.trainer.agent_control",)  # of ranks that have an agent; without gRPC, which has threads


class Agent:
    """The agent of one node; a context manager that ends its ranks (after they had their grace) when it is left.

    config: its services name train, data and checkpoint. entry, preload: what ranks run, and what their fork server
    imports before. Raises PhalanxError for what the user must change.
    """

    def __init__(self, config: ServiceConfig, entry: str = ENTRY, preload: Sequence[str] = PRELOAD) -> None:
        self._config, self._options = config, config.option_table(Options)
        self._check_options()
        self._options.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.node_id, self.inventory = node_id(self._options), take_inventory(self._options)
        self._instance_id = secrets.token_hex(8)
        self._attempts = Attempts()
        self._servers = ForkServers((*preload, *OWN_PRELOAD), lambda own: preparing.code_digest(own, DIGEST_DEADLINE_S))
        self._train = connect_service(config, "train")
        credentials = replace(config.security.credentials, token=None)
        context = ClientConfig(config.services, credentials)
        self._data = connect_client(context, "data", idempotent=DATA_METHODS)
        self._checkpoint = connect_client(context, "checkpoint", idempotent=CHECKPOINT_METHODS)
        self._uplink = Uplink(
            self._train,
            self._hello,
            lambda order: self._executor.take(order),
            self._acknowledged,
            heartbeat_s=self._options.heartbeat_s,
            max_waiting=self._options.max_waiting_records,
        )
        self._node = Node(
            self.node_id,
            self._servers,
            Slots(self.inventory.num_slots, self.inventory.gpus),
            self._attempts,
            self._options.state_dir / "ranks",
            self._uplink.put,
            Exports(self._monitor(config)),
            self._options.max_log_bytes,
        )
        self._socket = socket_path(self._options)
        self._keeper = self._kept_in_memory(credentials)
        self._replica_server: ReplicaServer | None = None
        self._executor = Executor(
            self._node, self._servers, self.inventory.address, self._socket, self._uplink.answer, entry, self._keeper
        )

    def __enter__(self) -> Self:
        on_behalf = OnBehalf(self._attempts, self._data, self._checkpoint, self._node.supersede, self._node.committed)
        shares = RankShares(self._keeper, self._node.gang)
        ranks, metrics = RankServer(self._attempts, on_behalf, shares), Metrics()
        if self._keeper is not None:
            self._replica_server = ReplicaServer(self._keeper.memory, self._config.security, self.inventory.address)
        add_figures(
            metrics.registry,
            is_connected=lambda: self._uplink.is_connected,
            num_ranks=lambda: self._node.num_ranks,
            num_slots=self.inventory.num_slots,
            num_dropped=lambda: self._uplink.num_dropped,
        )
        self._rank_server = serve_unix(
            self._socket, [lambda server: add_RankServiceServicer_to_server(ranks, server)], ACCESS, metrics=metrics
        )
        self._metrics_server = MetricsServer(metrics, self._config.metrics) if self._config.metrics else None
        self.metrics_address = self._metrics_server.address if self._metrics_server is not None else ""
        self._uplink.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._uplink.say_end()
            self._node.stop(self._grace_s)
            self._uplink.flush(FLUSH_DEADLINE_S)
        finally:
            self._say_end()
            self._servers.close()
            self._uplink.close()
            self._rank_server.stop(0.0)
            if self._replica_server is not None:
                self._replica_server.close()
            if self._metrics_server is not None:
                self._metrics_server.close()
            for channel in (self._train, self._data, self._checkpoint):
                channel.close()

    def hurry(self) -> None:
        """Ends all ranks at once, whatever grace they were given."""
        self._node.hurry()

    def held(self) -> list[pb.HeldGang]:
        """The gangs that live here, and those whose end train has not acknowledged."""
        return self._node.held()

    def _monitor(self, config: ServiceConfig) -> Callable[[GangKey], Sink] | None:
        if "monitor" not in config.services:
            return None
        return to_monitor(config.services["monitor"], config.security.credentials, self.node_id)

    def _grace_s(self, held: HeldGang) -> float:
        """The job's `[deadlines]`, or the agent's own where that is shorter."""
        return min(self._options.stop_grace_s or held.facts.grace_s, held.facts.grace_s)

    def _say_end(self) -> None:
        """A disk that is full must not keep the rest from ending."""
        for each in self._node.killed:
            LOG.error("%s", each)
        try:
            write_end(self._options.state_dir, self._node.killed)
        except OSError as error:
            LOG.error("the end cannot be told: %s", error)

    def _check_options(self) -> None:
        fraction, log_bytes = self._options.replica_fraction, self._options.max_log_bytes
        if not 0 <= fraction <= 1:
            _refuse("replica_fraction", fraction, "from 0 to 1")
        if log_bytes < 0:
            _refuse("max_log_bytes", log_bytes, "a number of bytes, or 0 for no bound")

    def _kept_in_memory(self, credentials: Credentials) -> ReplicaKeeper | None:
        max_bytes = int(self._options.replica_fraction * self.inventory.memory_bytes)
        if max_bytes and not self._config.security.token_key.exists():
            LOG.warning("steps of jobs are not kept in memory: %s is missing", self._config.security.token_key)
            return None
        return ReplicaKeeper(ReplicaMemory(max_bytes), credentials, self._checkpoint) if max_bytes else None

    def _hello(self) -> pb.Hello:
        inventory = records.to_inventory(self.inventory)
        if self._keeper is not None and self._replica_server is not None:
            inventory.replica_address = self._replica_server.address
            inventory.replica_bytes = self._keeper.memory.max_bytes
        return pb.Hello(
            node_id=self.node_id,
            instance_id=self._instance_id,
            inventory=inventory,
            gangs=self._node.held(),
            version=importlib.metadata.version("phalanx"),
        )

    def _acknowledged(self, report: Numbered[Item]) -> None:
        for item in report.items:
            self._node.acknowledged(GangKey(report.job, report.attempt), item)


def _refuse(key: str, value: float, expected: str) -> NoReturn:
    raise PhalanxError(f"options.{key}", value=value, expected=expected, remedy="correct or leave it out")


def socket_path(options: Options) -> Path:
    """Where ranks reach this agent: in the state folder, or in a folder of one's own with a short name where that path
    is longer than a Unix socket's may be.
    """
    if options.socket:
        return Path(options.socket)
    path = options.state_dir.absolute() / "socket" / "ranks"
    if len(str(path).encode()) <= MAX_PATH_BYTES:
        return path
    name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}-{name}" / "ranks"
